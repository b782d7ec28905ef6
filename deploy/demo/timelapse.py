"""The shipped rules in time-lapse: every duration is divided by one factor, and nothing else is changed.

An alert that waits for 15 minutes over a window of an hour is too slow for a demo of five minutes. Divided are: `for`, ranges, steps of
subqueries, offsets, the horizon of predict_linear, and the seconds with which an age (`time() - ...`) is compared. Everything else stays the same,
byte for byte: names, thresholds, texts. A factor of 1 returns the file unchanged.

The files are processed as text, because nothing else may change, with just enough of YAML and PromQL for them. Unsupported constructs
are rejected (`Unknown`): a duration that was missed would change the meaning of a rule.

Not here: whether the rules are valid. promtool and tests/dashboards check that.
"""
import re

# key of a line in the rule files to the kind of its value
KEYS = {
    "groups": "", "name": "", "rules": "", "alert": "", "record": "", "labels": "", "annotations": "", "summary": "",
    "description": "", "command": "", "dashboard_url": "", "runbook_url": "", "expr": "expression", "for": "span", "keep_firing_for": "span", "interval": "span",
}  # fmt: skip
LINE = re.compile(r"(?P<head>\s*(?:- )?(?P<key>\w+):)(?P<gap> ?)(?P<value>.*)")
SPAN = re.compile(r"(\d+)(ms|[smhdw])")
MILLIS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

TOKEN = re.compile(
    r"""\s+|(?P<string>"(?:[^"\\]|\\.)*")|(?P<span>\d+(?:ms|[smhdw])\b)|(?P<number>\d+(?:\.\d+)?)(?![\w.])
    |(?P<name>[a-zA-Z_][\w:]*)|(?P<op>==|!=|=~|!~|<=|>=|[-+*/<>=(){}\[\],:])""",
    re.X,
)
COMPARISONS = {"==", "!=", "<", ">", "<=", ">="}
SET_WORDS = {"and", "or", "unless"}
LISTS = {"on", "ignoring", "by", "without", "group_left", "group_right"}
# functions without an argument that is a duration
FUNCTIONS = {
    "abs", "absent", "avg", "avg_over_time", "changes", "count", "count_over_time", "delta", "deriv", "group", "increase",
    "label_replace", "last_over_time", "max", "max_over_time", "min", "min_over_time", "rate", "sum", "timestamp", "topk", "vector",
}  # fmt: skip


class Unknown(Exception):
    """The rules have a construct that cannot be divided safely."""


def divided(span, factor):
    """Divides a duration such as 15m: in its own unit if the result is whole, else in the largest unit in which it is."""
    found = SPAN.fullmatch(span)
    if not found:
        raise Unknown(f"{span!r} is not a duration of one unit")
    millis = int(found[1]) * MILLIS[found[2]]
    if millis % factor:
        raise Unknown(f"{span} divided by {factor} is not a whole number of milliseconds")
    for unit in (found[2], "h", "m", "s", "ms"):
        if millis // factor % MILLIS[unit] == 0:
            return f"{millis // factor // MILLIS[unit]}{unit}"
    raise AssertionError("milliseconds are whole")


class Expression:
    """Finds the durations in one expression and divides them."""

    def __init__(self, text, factor):
        self.text, self.factor, self.tokens, self.edits = text, factor, [], []
        at = 0
        while at < len(text):
            found = TOKEN.match(text, at)
            if not found:
                raise Unknown(f"{text[at:at + 20]!r} in {text!r}")
            if found.lastgroup:
                self.tokens.append((found.lastgroup, found[0], found.start()))
            at = found.end()

    def result(self):
        if self.group(0, None) != len(self.tokens):
            raise Unknown(f"unbalanced: {self.text!r}")
        text = self.text
        for start, old, new in sorted(self.edits, reverse=True):
            text = text[:start] + new + text[start + len(old):]
        return text

    def word(self, at):
        return self.tokens[at][1] if at < len(self.tokens) else None

    def edit_span(self, at):
        kind, old, start = self.tokens[at] if at < len(self.tokens) else ("", "the end", 0)
        if kind != "span":
            raise Unknown(f"{old!r} where a duration should be: {self.text!r}")
        self.edits.append((start, old, divided(old, self.factor)))

    def edit_seconds(self, at):
        """Divides the number here, which is in seconds."""
        _, old, start = self.tokens[at]
        if float(old) % self.factor:
            raise Unknown(f"{old} s divided by {self.factor} is not a whole number of seconds: {self.text!r}")
        self.edits.append((start, old, str(int(float(old)) // self.factor)))

    def closing(self, at):
        """Returns the position of the closing bracket."""
        depth = 0
        for place in range(at, len(self.tokens)):
            depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(self.word(place), 0)
            if depth == 0:
                return place
        raise Unknown(f"unbalanced: {self.text!r}")

    def group(self, at, function):
        """Processes a pair of brackets after this function name; returns the position of the closing one."""
        operand, argument = at, 0
        while at < len(self.tokens) and self.word(at) != ")":
            kind, word, _ = self.tokens[at]
            if word == ",":
                argument, operand = argument + 1, at + 1
                if (function, argument) == ("predict_linear", 1):
                    at = self.horizon(at + 1)
                    continue
            elif word in SET_WORDS:
                operand = at + 1
            elif word in LISTS and self.word(at + 1) == "(":
                at = self.closing(at + 1)
                if self.word(operand) == word:
                    operand = at + 1  # the matching labels of a set operator belong to neither side
            elif word == "{":
                at = self.closing(at)
            elif word == "[":
                self.edit_span(at + 1)
                at += 2
                if self.word(at) == ":":
                    self.edit_span(at + 1)  # the default step is a setting of the server, which is not divided here
                    at += 2
                if self.word(at) != "]":
                    raise Unknown(f"{self.word(at)!r} where a range should end: {self.text!r}")
            elif word == "offset":
                self.edit_span(at + 1)
                at += 1
            elif word == "(":
                at = self.group(at + 1, self.function_before(at))
            elif word in COMPARISONS:
                self.compared(operand, at)
            elif kind == "span":
                raise Unknown(f"{word} is a duration in an unsupported place: {self.text!r}")
            at += 1
        return at

    def function_before(self, at):
        """Returns the name before this bracket, if it is a function."""
        kind, word, _ = self.tokens[at - 1] if at else ("", "", 0)
        if kind != "name" or word in SET_WORDS | LISTS:
            return None
        if word not in FUNCTIONS | {"predict_linear", "time"}:
            raise Unknown(f"{word}() is not supported: {self.text!r}")
        return word

    def horizon(self, at):
        """The second argument of predict_linear: a number of seconds, or a product; its last number is divided."""
        end = at
        while self.word(end) != ")":
            if self.tokens[end][0] != "number" and self.word(end) != "*":
                raise Unknown(f"the horizon of predict_linear: {self.text!r}")
            end += 1
        self.edit_seconds(end - 1)
        return end

    def compared(self, operand, at):
        """Handles a comparison whose left side begins at `operand`: if that is an age, the right side is in seconds."""
        words = [self.word(place) for place in range(operand, at)]
        kind, right = self.tokens[at + 1][:2] if at + 1 < len(self.tokens) else ("", "the end")
        if words[:4] == ["time", "(", ")", "-"]:
            if kind != "number":
                raise Unknown(f"an age compared to {right!r}: {self.text!r}")
            self.edit_seconds(at + 1)
        elif len(words) == 1 and self.tokens[operand][0] == "number" and float(words[0]):
            raise Unknown(f"{words[0]} is on the left side: {self.text!r}")
        elif kind == "number" and float(right) and (
            "time" in words or any("seconds" in word and "total" not in word for word in words)
        ):
            raise Unknown(f"seconds compared to {right}: {self.text!r}")


def rules(text, factor):
    """Returns the text of a rule file with its durations divided by a whole number. Raises Unknown."""
    lines, out, block = text.split("\n"), [], None
    for number, line in enumerate(lines):
        if block is not None:
            if not line.strip() or len(line) - len(line.lstrip()) > block[0]:
                block[1].append(line)
                continue
            out.append(Expression("\n".join(block[1]), factor).result())
            block = None
        if not line.strip() or line.lstrip().startswith("#"):
            out.append(line)
            continue
        found = LINE.fullmatch(line)
        if not found or found["key"] not in KEYS:
            raise Unknown(f"line {number + 1}: {line!r}")
        value = found["value"]
        what = KEYS[found["key"]]
        if what == "span":
            value = divided(value, factor)
        elif what == "expression" and value == "|2":
            block = (len(line) - len(line.lstrip()), [])
        elif what == "expression":
            if not value or value[0] in "\"'|>&*!" or " #" in value:
                raise Unknown(f"line {number + 1}: unsupported form of an expression: {line!r}")
            value = Expression(value, factor).result()
        out.append(found["head"] + found["gap"] + value)
    if block is not None:
        out.append(Expression("\n".join(block[1]), factor).result())
    return "\n".join(out)
