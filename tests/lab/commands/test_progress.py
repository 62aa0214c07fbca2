from __future__ import annotations

import io

from rich.console import Console

from thinwire.lab.commands.progress import steps_progress


def test_a_log_gets_a_line_now_and_then_and_the_last_one() -> None:
    text, now = io.StringIO(), [0.0]
    console = Console(file=text, force_terminal=False, width=40)
    with steps_progress(console, log_every_s=30, clock=lambda: now[0]) as update:
        for done in range(1, 6):
            update(done, 5, f"seed 0, a long description of what is going on, step {done}")
            now[0] += 16
    lines = text.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["1/5", "3/5", "5/5"]
    assert lines[0] == "1/5 steps: seed 0, a long description of what is going on, step 1"


def test_a_log_shows_steps_of_which_the_number_is_not_known() -> None:
    text = io.StringIO()
    with steps_progress(Console(file=text, force_terminal=False)) as update:
        update(1, None, "starting")
    assert text.getvalue() == "1/? steps: starting\n"


def test_a_terminal_gets_a_bar() -> None:
    text = io.StringIO()
    with steps_progress(Console(file=text, force_terminal=True, width=80)) as update:
        update(5, 5, "loss 2.5")
    assert "loss 2.5" in text.getvalue()
    assert "5/5" in text.getvalue()
