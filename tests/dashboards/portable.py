"""What queries must be so that they mean the same at Prometheus and at VictoriaMetrics, by scrape and by OTLP.

* MetricsQL's `increase()`, `delta()` and `changes()` take the value before a series' first sample for 0: of a series that is new to the server,
  or was missing for longer than the window, a small counter's whole value is its increase. Such a function is accepted only in a place that is
  listed here, with the reason; counts are `last_over_time(x[W]) - min_over_time(x[W])`.
* By OTLP a series that ended stays for five minutes, so an info series has two values after a restart: a join takes the newest.
* Which of equal values `topk(1, ...)` takes changes at VictoriaMetrics from one evaluation to the next, so an alert on it begins again: a rule
  that chooses one of several series ranks them by the time of their samples.
* vmalert adds its external labels to what it records: recorded series match others `on` labels.
"""
import promql

BIRTHS = {"increase", "delta", "idelta", "changes"}
# Where changes() is safe: alert to reason.
CHANGES = {
    "MemledgerSnapshotStale": "compared with 0, and one change too many for a moment after a gap delays it by a sample",
}


def selector(node):
    """Returns the series of a call over a range, with its window; None for anything else."""
    inner = node.arguments[-1] if isinstance(node, promql.Call) and node.arguments else None
    return (inner.name, tuple(inner.matchers), inner.window) if isinstance(inner, promql.Selector) else None


def is_call(node, function):
    return isinstance(node, promql.Call) and node.function == function


def is_reset_of(node, wanted):
    """Returns whether a node is `... unless resets(x) > 0` of these series."""
    return (
        isinstance(node, promql.Binary) and node.op == "unless"
        and isinstance(node.right, promql.Binary) and node.right.op == ">" and is_call(node.right.left, "resets")
        and selector(node.right.left) == wanted
    )  # fmt: skip


def differences(node, name, reason=None):
    """Yields each call of a function that counts births: (function, series, reason why it is safe or None)."""
    if isinstance(node, promql.Call) and node.function in BIRTHS:
        series = selector(node)
        why = CHANGES.get(name) if node.function == "changes" else reason(series) if reason else None
        yield node.function, series[0] if series else "?", why
    for child in promql.children(node):
        inner = reason
        if isinstance(node, promql.Binary):
            inner = None
            if node.op == "and" and child is node.right and isinstance(child, promql.Aggregation) and child.function == "topk":
                inner = lambda series: "only ranks the series of the left side"  # noqa: E731
            elif node.op == "or" and child is node.right and is_call(child, "increase"):
                inner = lambda series, left=node.left: "only of series that were reset in the window" if is_reset_of(left, series) else None  # noqa: E731
            elif reason and node.op in ("and", "or"):
                inner = reason  # still inside the topk
        yield from differences(child, name, inner)


def mismatches(tree):
    """Yields a difference of the last and the least sample of two different series or windows."""
    for node in promql.walk(tree):
        if isinstance(node, promql.Binary) and node.op == "-" and is_call(node.right, "min_over_time") and is_call(node.left, "last_over_time"):
            if selector(node.left) != selector(node.right):
                yield f"subtracts min_over_time of {selector(node.right)} from last_over_time of {selector(node.left)}"


def is_newest(node):
    """Returns whether a node selects one series of each group by the time of its sample."""
    return (
        isinstance(node, promql.Aggregation) and node.function == "topk" and node.arguments[0] == promql.Number(1)
        and is_time(node.arguments[1])
    )  # fmt: skip


def is_time(node):
    """Returns whether a rank is the time of samples, of now or of a window."""
    return is_call(node, "timestamp") or is_call(node, "max_over_time") and is_call(node.arguments[0], "timestamp")


def choices(tree):
    """Yields each choice of one of several series of which two may be equal. On a panel any of them may be shown."""
    for node in promql.walk(tree):
        if isinstance(node, promql.Aggregation) and node.function in ("topk", "bottomk") and node.mode and node.arguments[0] == promql.Number(1):
            if not is_newest(node):
                yield f"chooses one series by {node.function} {node.mode} ({', '.join(node.labels)}), and which one of equal values changes at VictoriaMetrics: rank by timestamp()"


def joins(tree):
    """Yields each join on an info series that may have two values."""
    for node in promql.walk(tree):
        if isinstance(node, promql.Binary) and node.group and node.extra:
            one = node.left if node.group == "group_right" else node.right
            inside = list(promql.walk(one))
            names = [each.name for each in inside if isinstance(each, promql.Selector) and each.name.endswith("_info")]
            if names and not any(map(is_newest, inside)):
                yield f"joins {names[0]}, which has two values after a restart by OTLP: take the newest"


def kinds(node):
    """Returns whether a result is of recorded series, of others, or of both, as far as its labels show it."""
    names = [each.name for each in promql.walk(node) if isinstance(each, promql.Selector)]
    return {":" in name for name in names}


def matches(tree):
    """Yields each match of a recorded series with another one on all labels."""
    for node in promql.walk(tree):
        if isinstance(node, promql.Binary) and node.matching != "on":
            left, right = kinds(node.left), kinds(node.right)
            if left and right and node.op != "or" and len(left | right) > 1 and (left != right or node.matching):
                yield f"{node.op} matches a recorded series with another on all labels, which vmalert's external labels prevent: use on ()"


def errors(tree, name):
    """Returns what is not portable in a query; `name` is that of the rule, or empty."""
    found = [f"{function}({series}) counts the births of series at VictoriaMetrics: use last_over_time - min_over_time" for function, series, why in differences(tree, name) if not why]
    return [*found, *mismatches(tree), *joins(tree), *(choices(tree) if name else ()), *matches(tree)]
