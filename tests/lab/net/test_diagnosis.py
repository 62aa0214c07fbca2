from __future__ import annotations

import os

import pytest

from thinwire.lab.net import available, doctor
from thinwire.lab.net.namespace import existing


def test_every_finding_is_one_line_and_a_bad_one_has_a_fix() -> None:
    findings = doctor()
    for finding in findings:
        assert "\n" not in str(finding)
        assert finding.ok or finding.fix
    assert findings[0].name == "root"
    assert findings[0].ok == (os.geteuid() == 0)
    assert {"ip", "tc", "leftover namespaces", "machine"} <= {finding.name for finding in findings}
    assert existing(f"tw{os.getpid()}-") == []


def test_available_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = available()
    assert reason is not None
    assert "root" in reason
    assert "paced" in reason


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "iproute2" in (available() or "")


@pytest.mark.root
def test_a_machine_with_netlab_has_the_needed_findings(netlab: None) -> None:
    assert {"network namespaces", "veth", "bridge", "tbf"} <= {f.name for f in doctor() if f.ok}
