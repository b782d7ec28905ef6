"""Parses PromQL into a tree, and derives the series it selects, the labels its result can have, and its unit.

Covers the part of the language that this repository uses; anything else is rejected, so that nothing passes unchecked. A
regular expression would mistake a label in a string for a metric, or miss one in `on (...)`.

Not here: whether a query is valid. promtool and a real Prometheus check that.
"""
import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""\s+|\#[^\n]*
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<duration>(?:\d+(?:ms|[smhdwy]))+(?![\w]))
    |(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    |(?P<name>[a-zA-Z_][\w:]*)
    |(?P<op>==|!=|=~|!~|<=|>=|[-+*/%^<>=(){}\[\],:@])""",
    re.X,
)
AGGREGATIONS = {"sum", "min", "max", "avg", "count", "group", "topk", "bottomk", "quantile", "stddev"}
# lowest precedence first; set operators keep whole series, the others compute values
LEVELS = [{"or"}, {"and", "unless"}, {"==", "!=", "<", ">", "<=", ">="}, {"+", "-"}, {"*", "/", "%"}, {"^"}]
COMPARISONS = LEVELS[2]


class Unreadable(Exception):
    """The text is not PromQL, or uses a part of it that this parser does not support."""


@dataclass
class Number:
    value: float


@dataclass
class Text:
    value: str


@dataclass
class Selector:
    name: str
    matchers: list  # of (label, operator, value)
    window: str = ""  # of a range, such as 5m


@dataclass
class Call:
    function: str
    arguments: list


@dataclass
class Aggregation:
    function: str
    arguments: list
    mode: str = ""  # by, without, or nothing
    labels: list = field(default_factory=list)


@dataclass
class Binary:
    op: str
    left: object
    right: object
    matching: str = ""  # on, ignoring, or nothing
    labels: list = field(default_factory=list)
    group: str = ""  # group_left, group_right, or nothing
    extra: list = field(default_factory=list)


class Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text):
        self.text, self.tokens, at = text, [], 0
        while at < len(text):
            found = TOKEN.match(text, at)
            if not found:
                raise Unreadable(f"{text[at:at + 20]!r} is not a token")
            if found.lastgroup:
                self.tokens.append((found.lastgroup, found[0]))
            at = found.end()
        self.at = 0

    def peek(self):
        return self.tokens[self.at][1] if self.at < len(self.tokens) else None

    def kind(self):
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    def take(self, wanted=None):
        token = self.peek()
        if token is None or (wanted is not None and token != wanted):
            raise Unreadable(f"{token!r} where {wanted or 'more'!r} should be")
        self.at += 1
        return token

    def accept(self, wanted):
        if self.peek() == wanted:
            self.at += 1
            return True
        return False

    def whole(self):
        tree = self.binary(0)
        if self.peek() is not None:
            raise Unreadable(f"{self.peek()!r} after the end")
        return tree

    def binary(self, level):
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in LEVELS[level]:
            node = Binary(self.take(), left, None)
            self.accept("bool")
            if self.peek() in ("on", "ignoring"):
                node.matching, node.labels = self.take(), self.names()
            if self.peek() in ("group_left", "group_right"):
                node.group = self.take()
                node.extra = self.names() if self.peek() == "(" else []
            node.right = self.binary(level + 1)
            left = node
        return left

    def unary(self):
        if self.peek() in ("-", "+"):
            self.take()
        return self.postfix(self.primary())

    def postfix(self, node):
        while self.peek() in ("[", "offset", "@"):
            if self.accept("offset"):
                self.duration()
                continue
            if self.accept("@"):
                self.moment()
                continue
            self.take("[")
            window = self.duration()
            if self.accept(":"):
                if self.peek() != "]":
                    self.duration()
            elif isinstance(node, Selector):
                node.window = window
            else:
                raise Unreadable("a range of something other than a series")
            self.take("]")
        return node

    def moment(self):
        """What follows @: the start or the end of the range."""
        if self.take() not in ("start", "end"):
            raise Unreadable("a time other than start() and end()")
        self.take("(")
        self.take(")")

    def duration(self):
        if self.kind() != "duration":
            raise Unreadable(f"{self.peek()!r} is not a duration")
        return self.take()

    def names(self):
        self.take("(")
        found = []
        while not self.accept(")"):
            if self.kind() != "name":
                raise Unreadable(f"{self.peek()!r} is not a label")
            found.append(self.take())
            if self.peek() != ")":
                self.take(",")
        return found

    def primary(self):
        kind, token = self.kind(), self.peek()
        if token == "(":
            self.take()
            inner = self.binary(0)
            self.take(")")
            return inner
        if kind == "number":
            return Number(float(self.take()))
        if kind == "string":
            return Text(self.take()[1:-1])
        if token == "{":
            return self.selector("")
        if kind != "name":
            raise Unreadable(f"{token!r} where a value should be")
        self.take()
        if token in AGGREGATIONS and self.peek() in ("(", "by", "without"):
            return self.aggregation(token)
        return Call(token, self.arguments()) if self.peek() == "(" else self.selector(token)

    def aggregation(self, function):
        node = Aggregation(function, [])
        if self.peek() in ("by", "without"):
            node.mode, node.labels = self.take(), self.names()
        node.arguments = self.arguments()
        if self.peek() in ("by", "without"):
            node.mode, node.labels = self.take(), self.names()
        return node

    def arguments(self):
        self.take("(")
        found = []
        while not self.accept(")"):
            found.append(self.binary(0))
            if self.peek() != ")":
                self.take(",")
        return found

    def selector(self, name):
        node = Selector(name, [])
        if self.accept("{"):
            while not self.accept("}"):
                label, op = self.take(), self.take()
                if op not in ("=", "!=", "=~", "!~") or self.kind() != "string":
                    raise Unreadable(f"{label} {op} {self.peek()!r} is not a matcher")
                node.matchers.append((label, op, self.take()[1:-1]))
                if self.peek() != "}":
                    self.take(",")
        return node


def parse(text):
    """Returns the tree of an expression. Raises Unreadable."""
    return Parser(text).whole()


def is_limited(node):
    """Returns whether topk or bottomk limits the number of series of a result."""
    if isinstance(node, Binary):
        sides = [is_limited(node.left), is_limited(node.right)]
        return all(sides) if node.op == "or" else sides[0] if node.op == "unless" else any(sides)
    if isinstance(node, Aggregation) and node.function in ("topk", "bottomk"):
        return True
    return any(is_limited(child) for child in children(node))


def children(node):
    if isinstance(node, Binary):
        return [node.left, node.right]
    return node.arguments if isinstance(node, (Call, Aggregation)) else []


def walk(node):
    """Yields the node and all nodes below it."""
    yield node
    for child in children(node):
        yield from walk(child)


class Reader:
    """Checks trees against the known series: a table of name to (labels, unit, is a counter)."""

    def __init__(self, table):
        self.table = table

    def errors(self, node):
        """Returns the errors in a tree: unknown series, unknown labels, counters that are not differenced."""
        found = []
        self.labels(node, found)
        return found

    def labels(self, node, found):
        """Returns the labels that a result can have; None for a number. Errors are added to `found`."""
        if isinstance(node, Selector):
            return self.of_selector(node, found)
        if isinstance(node, Aggregation):
            inner = [self.labels(argument, found) for argument in node.arguments][-1] or set()
            for label in node.labels:
                if label not in inner:
                    found.append(f"{node.function} {node.mode} ({label}): the series have no such label")
            if node.function in ("topk", "bottomk"):
                return inner  # it selects series, of each group
            if node.mode == "by":
                return set(node.labels)
            if node.mode == "without":
                return inner - set(node.labels)
            return set()
        if isinstance(node, Call):
            inner = [self.labels(argument, found) for argument in node.arguments]
            if node.function == "absent":
                return {label for label, op, _ in node.arguments[0].matchers if op == "="}
            if node.function in ("label_replace", "label_join"):
                return (inner[0] or set()) | {node.arguments[1].value}
            return next((labels for labels in inner if labels is not None), set() if node.function == "vector" else None)
        if isinstance(node, Binary):
            return self.of_binary(node, found)
        return None

    def of_selector(self, node, found):
        if node.name not in self.table:
            found.append(f"{node.name or '{}'}: no such series")
            return {label for label, _, _ in node.matchers}
        labels = self.table[node.name].labels
        for label, _, _ in node.matchers:
            if label not in labels:
                found.append(f"{node.name}{{{label}}}: it has no such label")
        return labels

    def of_binary(self, node, found):
        left, right = self.labels(node.left, found), self.labels(node.right, found)
        if left is None or right is None:
            return left if right is None else right
        for label in node.labels:
            for side in (left, right) if node.matching == "on" else (left | right,):
                if label not in side:
                    found.append(f"{node.op} {node.matching} ({label}): a side has no such label")
        if node.op in ("and", "unless"):
            return left
        if node.op == "or":
            return left | right
        many, one = (right, left) if node.group == "group_right" else (left, right)
        for label in node.extra:
            if label not in one:
                found.append(f"{node.group} ({label}): the other side has no such label")
        if node.group:
            return many | set(node.extra)
        if node.matching == "on":
            return set(node.labels)
        return left - set(node.labels)

    def unit(self, node):
        """bytes, s, h, time (a point in time), ratio, watt, joule, celsius, count, or a quotient of two; None for a number."""
        if isinstance(node, Selector):
            return self.table[node.name].unit if node.name in self.table else "count"
        if isinstance(node, Aggregation):
            return "count" if node.function in ("count", "group") else self.unit(node.arguments[-1])
        if isinstance(node, Call):
            return self.unit_of_call(node)
        if isinstance(node, Binary):
            return self.unit_of_binary(node)
        return None

    def unit_of_call(self, node):
        if node.function in ("time", "timestamp"):
            return "time"
        inner = next((unit for unit in map(self.unit, node.arguments) if unit), None)
        if node.function in ("rate", "irate", "deriv"):
            return {"s": "ratio", "joule": "watt", "count": "count"}.get(inner, f"{inner}/s")
        return inner

    def unit_of_binary(self, node):
        left, right = self.unit(node.left), self.unit(node.right)
        if node.op == "-" and left == right == "time":
            return "s"
        if node.op == "/" and left == "s" and node.right == Number(3600):
            return "h"
        if node.op == "/" and left and right:
            if left == right:
                return "ratio"
            return "s" if right == f"{left}/s" else left if right == "count" else f"{left}/{right}"
        if node.op == "*" and right and left and right != "count":
            return f"{left}*{right}"
        return left or right
