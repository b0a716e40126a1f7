"""Products of one batch's curvature with a vector."""

from eigentrace.curvature.products import Differentiation, product_of


def relative(a, b):
    return float((a - b).norm() / b.norm())


def product(task, batch, v, kind="gauss-newton", form=Differentiation.DUAL, precision="fp32"):
    with task.session():
        found = product_of(kind, form, precision)(task, task.params, task.layout.unflatten(v), batch)
    return task.layout.flatten(found)


def in_float(case):
    task = case.make_task(case.task.model.float(), l2=0.0)
    return task, tuple(t.float() if t.is_floating_point() else t for t in case.batches[0])
