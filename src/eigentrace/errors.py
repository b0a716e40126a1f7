"""Exceptions and warnings of eigentrace; each exception also inherits from a built-in one."""


class EigentraceError(Exception):
    """Base class of all exceptions that eigentrace raises."""


class InputError(EigentraceError, ValueError):
    """An argument, batch or file has the wrong type, shape or value."""


class TaskError(EigentraceError, ValueError):
    """The model, the loss or the selected parameters cannot be used for attribution."""


class DataError(EigentraceError, ValueError):
    """The data is empty, out of order or in a form that cannot be read."""


class DeterminismError(EigentraceError, RuntimeError):
    """Two evaluations that must be equal differ."""


class NumericalError(EigentraceError, ArithmeticError):
    """A computation diverged or produced NaN or infinity."""


class UnsupportedError(EigentraceError, NotImplementedError):
    """The requested operation is not supported for this method or model."""


class MismatchError(EigentraceError, ValueError):
    """A stored artifact is missing or damaged, or was made for another model, task or format."""


class StorageError(EigentraceError, OSError):
    """The disk is full, or a file cannot be written or read."""


class UntrustedError(EigentraceError, RuntimeError):
    """A file asks to import and call code, and the user has not said that it may."""


class BusyError(EigentraceError, RuntimeError):
    """Another process has the write lock of the directory."""


class EigentraceWarning(UserWarning):
    """Base class of all warnings that eigentrace issues."""


class ConvergenceWarning(EigentraceWarning):
    """The kept eigenpairs have not converged."""


class PrecisionWarning(EigentraceWarning):
    """Results are less precise than the caller may expect."""


class MemoryLimitError(EigentraceError, RuntimeError):
    """A single example, or the basis of a fit, does not fit in memory."""
