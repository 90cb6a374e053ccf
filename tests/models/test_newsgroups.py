"""20 Newsgroups: folders and archives, what is taken off a post, its words, and files that are not whole."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi.models.newsgroups import ARCHIVES, FOLDER, SPLITS, body, corpus, load, read_posts, tokens

POST = (
    "From: somebody@example.org\nSubject: drives\n\n"
    "In article <1>, another writes:\n> Old disks\n\nThe disk drives were running; \xe9t\xe9.\n\n--\nA Signature\n"
)


def _files() -> dict[str, str]:
    """Two posts a group to train on and one to test; group k's second post has k + 1 rockets."""
    out = {}
    for k in range(20):
        group = f"group.{chr(97 + k)}"
        out[f"{SPLITS['train']}/{group}/{100 + k}"] = POST
        out[f"{SPLITS['train']}/{group}/20"] = "Subject: none\n\n" + "rocket " * (k + 1)
        out[f"{SPLITS['test']}/{group}/7"] = "Subject: none\n\nunseen rockets\n" if k else "Subject: none\n\nunseen\n"
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in _files().items():
        path = tmp_path / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    return tmp_path


def _archive(path: Path, extra: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**_files(), **(extra or {})}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode("latin-1")))
    return path


def test_an_archive_reads_as_the_folders_do(folder: Path, tmp_path: Path) -> None:
    archive = _archive(tmp_path / "other" / FOLDER / ARCHIVES[0])
    posts = read_posts(archive.parent, "train")
    assert posts == read_posts(folder / FOLDER, "train")
    assert len(posts) == 40
    assert posts[:2] == [
        ("group.a", 20, "Subject: none\n\nrocket "),
        ("group.a", 100, POST),
    ]


def test_names_that_lead_elsewhere_are_not_read(tmp_path: Path) -> None:
    """Only files of the published layout count, and nothing is written."""
    foreign = {f"{SPLITS['train']}/../../evil/1": "x", "/etc/20": "x", f"{SPLITS['train']}/group.a/1.sh": "x"}
    archive = _archive(tmp_path / FOLDER / ARCHIVES[1], foreign)
    with tarfile.open(archive) as content:
        assert len(content.getnames()) == 63
    assert len(read_posts(archive.parent, "train")) == 40
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [ARCHIVES[1]]


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    archive = _archive(tmp_path / FOLDER / ARCHIVES[0])
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="not a whole archive"):
        read_posts(archive.parent, "train")
    archive.write_bytes(b"no archive")
    with pytest.raises(InputError, match="not a whole archive"):
        read_posts(archive.parent, "train")


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / FOLDER / SPLITS["train"] / "group.b" / "20").unlink()
    (folder / FOLDER / SPLITS["train"] / "group.b" / "101").unlink()
    with pytest.raises(InputError, match="posts of 19 groups in 'train', not of 20"):
        read_posts(folder / FOLDER, "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"download it from http://qwone\.com"):
        read_posts(tmp_path / "empty", "train")
    with pytest.raises(InputError, match="split = 'all' is unknown"):
        read_posts(folder / FOLDER, "all")


def test_what_is_taken_off_a_post() -> None:
    assert body(POST).startswith("In article <1>")
    assert "Signature" in body(POST)
    bare = body(POST, ("footers", "quotes"))
    assert bare.strip() == "The disk drives were running; \xe9t\xe9."
    assert body("no headers at all") == ""


def test_words() -> None:
    pytest.importorskip("simplemma")
    pytest.importorskip("stop_words")
    assert tokens("The government's Files WERE running at 10 km/h, x11 windows") == ["government", "file", "window"]


def test_counts(folder: Path) -> None:
    pytest.importorskip("simplemma")
    pytest.importorskip("stop_words")
    bare = ("footers", "quotes")
    train = corpus(folder, words=3, remove=bare)
    assert train.words == ("disk", "drive", "rocket")  # in twenty posts each
    assert train.counts[:4].tolist() == [[0, 0, 1], [1, 1, 0], [0, 0, 2], [1, 1, 0]]
    assert train.groups[:4].tolist() == [0, 0, 1, 1]
    test = load(folder, "test", words=3, remove=bare)
    assert test.records["counts"].tolist() == [[0, 0, 1]] * 19
    given = corpus(folder, "test", train.words, bare)
    assert torch.equal(given.counts, test.records["counts"])
    assert test.record_ids.tolist() == list(range(1, 20))  # the first post has no word of the vocabulary
    with pytest.raises(InputError, match="words = 5000, but the training posts have"):
        corpus(folder, words=5000)
    with pytest.raises(InputError, match="remove = 'headers' is unknown"):
        corpus(folder, remove=("headers",))
    with pytest.raises(InputError, match="words must be"):
        load(folder, words=1)
