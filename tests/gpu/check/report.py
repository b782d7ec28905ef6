"""Results of the comparisons, and the report of them."""
import datetime

MIB = 1 << 20


class Result:
    """One comparison. `state` is ok, FAILED or skipped."""

    def __init__(self, part, name, state, got="", wanted="", note=""):
        self.part, self.name, self.state, self.got, self.wanted, self.note = part, name, state, got, wanted, note


def size(value):
    return "none" if value is None else f"{value / MIB:.1f} MiB"


class Report:
    def __init__(self):
        self.results, self.notes, self.facts, self.part = [], [], {}, ""

    def add(self, name, state, got="", wanted="", note=""):
        result = Result(self.part, name, state, got, wanted, note)
        self.results.append(result)
        print(f"{state:8} {self.part}: {name}  {got}" + (f"  (wanted {wanted})" if wanted else "")
              + (f"  {note}" if note else ""), flush=True)
        return state == "ok"

    def count(self, state):
        return sum(result.state == state for result in self.results)

    def status(self):
        """The exit code: 0 all agreed, 1 one did not, 2 nothing was compared."""
        if self.count("FAILED"):
            return 1
        return 0 if self.count("ok") else 2

    def text(self):
        verdict = {0: "every comparison agrees", 1: f"{self.count('FAILED')} comparisons FAILED",
                   2: "nothing could be compared"}[self.status()]
        out = [f"# memledger on a GPU: {verdict}", ""]
        stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        out += [f"Written by tests/gpu/check.sh on {stamp}: {self.count('ok')} ok, {self.count('FAILED')} failed, "
                f"{self.count('skipped')} skipped.", ""]
        if self.facts.get("stand-in"):
            out += ["**A dry run: the GPU, the driver's library, nvidia-smi and torch are stand-ins. It says nothing of "
                    "real hardware.**", ""]
        out += ["| machine | |", "| --- | --- |"]
        out += [f"| {key} | {cell(value)} |" for key, value in self.facts.items()]
        out += ["", "| | part | comparison | memledger | wanted | note |", "| --- | --- | --- | --- | --- | --- |"]
        for one in self.results:
            out.append(f"| {one.state} | " + " | ".join(
                cell(value) for value in (one.part, one.name, one.got, one.wanted, one.note)) + " |")
        out += ["", "## Notes", ""] + [f"* {cell(note)}" for note in self.notes] + [""]
        return "\n".join(out)


def cell(value):
    return str(value).replace("|", "\\|").replace("\n", " ")[:600]
