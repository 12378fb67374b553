"""A git repository for a task."""

import subprocess
from pathlib import Path


def git(repo: Path, *args: str) -> str:
    names = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    return subprocess.run(["git", "-C", repo, *names, *args], check=True, capture_output=True, text=True).stdout


def sample_repository(folder: Path) -> Path:
    repo = folder / "sample"
    repo.mkdir()
    git(repo, "init", "-q")
    (repo / "README.md").write_text("# sample\n")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "first")
    return repo
