from eigentrace.demo.report import MethodRow, methods_table


def test_columns_are_aligned():
    rows = [MethodRow("Loss", None, 99.7, 98.96, 0.0, 1.0), MethodRow("Arnoldi (tail)", 50, 100.0, 9.5, 123.4, 2.0)]
    assert methods_table(rows).split("\n") == [
        "method           K  AUC %  AP %  fit s  score s",
        "Loss             –   99.7  99.0    0.0      1.0",
        "Arnoldi (tail)  50  100.0   9.5  123.4      2.0",
    ]


def test_no_methods_leave_the_headings():
    assert methods_table([]) == "method  K  AUC %  AP %  fit s  score s"
