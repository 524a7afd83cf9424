"""Known vulnerabilities of the pinned packages (pip-audit) and secrets in tracked files (detect-secrets).

Exit code 1 for a finding, 0 else. What cannot be asked for want of a network is skipped in one line that says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TOOLS = ("pip-audit>=2.9,<3", "detect-secrets>=1.5,<2")
_PLANTED = r"s3cret|none|wrong-horse-battery|correct-horse-battery|secret"
"""What tests and documentation use where a password would stand."""
_UNREAD = r"\.(png|safetensors|db|html|xz)$|^studies/.*(/model/.*|\.jsonl|results\.json|summary\.json|result\.json)$"
"""Pictures, weights, and megabytes of measurements, which take a minute and hold numbers."""
_TOKEN_IDS = r'^ +"[0-9a-f]{8}": "eN'
"""A config's sets of token ids, packed."""
_NOT_NETWORK = 2
"""pip-audit's own exit code for wrong usage; 1 is a finding or, without a report, a network that is not there."""


def main() -> int:
    """The command."""
    if not _install():
        return 0
    return max(_vulnerabilities(), _secrets())


def _run(*command: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _install() -> bool:
    done = _run("pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt", *_TOOLS)
    if done.returncode:
        _say(f"security: SKIPPED, pip cannot install {' and '.join(_TOOLS)}: {_last_line(done.stderr)}")
    return done.returncode == 0


def _vulnerabilities() -> int:
    flags = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "10", "--format", "json")
    done = _run("pip_audit", "-r", "constraints.txt", *flags)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        if done.returncode == _NOT_NETWORK:
            _say(f"pip-audit: {_last_line(done.stderr)}")
            return 1
        _say(f"pip-audit: SKIPPED, the vulnerability service cannot be reached: {_last_line(done.stderr)}")
        return 0
    asked = [one for one in packages if "skip_reason" not in one]
    if not asked:
        _say(f"pip-audit: SKIPPED, the vulnerability service knows none of the {len(packages)} packages")
        return 0
    found = [(one["name"], one["version"], flaw["id"]) for one in asked for flaw in one["vulns"]]
    _say(
        f"pip-audit: {len(asked)} of {len(packages)} pinned packages known to the service, {len(found)} vulnerabilities"
    )
    for name, version, flaw in found:
        _say(f"  {name} {version}: {flaw}")
    return 1 if found else 0


def _secrets() -> int:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split("\0") if name]
    # Hashes of weights, prompts and commits stand in every result and look as random as a key: entropy of hex says
    # nothing here. The other detectors know the forms of keys and passwords.
    flags = ("--disable-plugin", "HexHighEntropyString", "--exclude-secrets", f"^({_PLANTED})$", "--no-verify")
    done = _run("detect_secrets", "scan", *flags, "--exclude-files", _UNREAD, "--exclude-lines", _TOKEN_IDS, *files)
    if done.returncode:
        _say(f"detect-secrets: {_last_line(done.stderr)}")
        return 1
    found: dict[str, Sequence[dict[str, object]]] = json.loads(done.stdout)["results"]
    _say(f"detect-secrets: {len(files)} files, {sum(map(len, found.values()))} secrets")
    for name, secrets in found.items():
        for one in secrets:
            _say(f"  {name}:{one['line_number']}: {one['type']}")
    return 1 if found else 0


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
