"""README's commands: `make install`, and the blocks behind the comment `<!-- run -->`, with the program that `make dist` built."""

import os
import re

from machine import ROOT, is_verdict, oom_kill, output_of


def marked_commands(text):
    """Returns the commands of the marked blocks. Where a block has an answer too, its commands begin with `$ `."""
    for block in re.findall(r"^<!-- run -->\n```\w*\n(.*?)^```$", text, re.M | re.S):
        lines = block.splitlines()
        yield from [line[2:] for line in lines if line.startswith("$ ")] or lines


def test_marked_commands_of_readme_answer(packages, containers):
    text = (ROOT / "README.md").read_text()
    commands = list(marked_commands(text))
    assert len(commands) == text.count("<!-- run -->") > 1, commands
    containers.append(oom_kill())
    for command in commands:
        assert re.fullmatch(r"sudo memledger [\w -]+", command) and "my-train" in command, command
        words = [containers[-1] if word == "my-train" else word for word in command.split()[2:]]
        assert is_verdict(output_of(packages / "memledger", *words), containers[-1]), command


def test_make_install_puts_the_program_below_its_prefix(packages, tmp_path):
    # the build is not repeated: `true` takes the place of cargo, and make finds the program that is built
    built = tmp_path / "target/release/memledger"
    built.parent.mkdir(parents=True)
    built.write_bytes((packages / "memledger").read_bytes())
    built.chmod(0o755)
    prefix = tmp_path / "prefix"
    output = output_of("make", "--no-print-directory", "-C", ROOT, "install", f"PREFIX={prefix}",
                       env={**os.environ, "CARGO": "true", "CARGO_TARGET_DIR": str(tmp_path / "target")})
    assert "(memledger-exporter," in output
    installed = prefix / "bin/memledger"
    assert installed.read_bytes() == built.read_bytes() and installed.stat().st_mode & 0o777 == 0o755
