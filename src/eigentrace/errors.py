"""Everything eigentrace raises or warns about, each also a built-in kind so that plain `except` clauses work."""


class EigentraceError(Exception):
    """Root of all errors raised on purpose by this package."""


class InputError(EigentraceError, ValueError):
    """An argument, batch or file is not what the call needs."""


class TaskError(EigentraceError, ValueError):
    """The model, the loss or the selected parameters cannot be attributed as they are."""


class DataError(EigentraceError, ValueError):
    """The data is empty, out of order or in a form that cannot be read."""


class DeterminismError(EigentraceError, RuntimeError):
    """Two evaluations that must agree do not."""


class NumericalError(EigentraceError, ArithmeticError):
    """A computation left the finite numbers or diverged."""


class UnsupportedError(EigentraceError, NotImplementedError):
    """The request has no meaning, or no engine, for this method or model."""


class MismatchError(EigentraceError, ValueError):
    """A stored artifact belongs to another model, task or format."""


class StorageError(EigentraceError, OSError):
    """The disk is full, or a file cannot be written or read."""


class BusyError(EigentraceError, RuntimeError):
    """Another process writes where this one wants to."""


class EigentraceWarning(UserWarning):
    """Root of all warnings issued by this package."""


class ConvergenceWarning(EigentraceWarning):
    """The kept eigenpairs have not settled."""


class PrecisionWarning(EigentraceWarning):
    """Numbers are less exact than the caller may expect."""


class MemoryLimitError(EigentraceError, RuntimeError):
    """One example does not fit in memory."""
