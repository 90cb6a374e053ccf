"""20 Newsgroups: 18,846 posts to twenty newsgroups, "bydate": 11,314 to train and 7,532 to test.

Data: K. Lang; sorted by date by J. Rennie, http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz (or
`sklearn.datasets.fetch_20newsgroups`, which unpacks it into its cache). Reads the archive as published, or the two
folders that come out of it, from the folder `20newsgroups`. Posts hold real names and addresses.

Words are lower-case runs of at least three letters, lemmatised and without English stop words; `pip install
secure-fvi[text]` brings the two word lists. The vocabulary is the words that occur in most training posts: counted by
post, as gensim does, since a few posts of encoded files would fill it otherwise.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.prodlda import prodlda

FOLDER = "20newsgroups"
#: The folder of each split, in the archive and out of it.
SPLITS = {"train": "20news-bydate-train", "test": "20news-bydate-test"}
ARCHIVES = ("20news-bydate.tar.gz", "20news-bydate-rebuilt.tar.gz")
GROUPS = 20
#: What may be taken off a post besides its headers.
REMOVABLE = ("footers", "quotes")
_PATH = re.compile(r"(?P<split>20news-bydate-(?:train|test))/(?P<group>[a-z.-]+)/(?P<id>[0-9]+)")
_WORD = re.compile(r"[a-z]{3,}")
#: The line that names who is quoted, and quoted lines, as scikit-learn tells them.
_QUOTE = re.compile(r"(writes in|writes:|wrote:|says:|said:|^In article|^Quoted from|^\||^>)")


class Post(NamedTuple):
    group: str
    number: int  # its name; a post to several groups has one in each
    text: str


class Corpus(NamedTuple):
    """Posts of one split as counts of words; posts without a word of the vocabulary are left out."""

    counts: Tensor  # (N, V) float32
    words: tuple[str, ...]  # (V,) in order of the training posts that they occur in
    groups: Tensor  # (N,) int64, place of the post's group among the sorted names
    ids: Tensor  # (N,) int64, place of the post in its split, by group and number


def read_posts(folder: Path, split: str) -> list[Post]:
    """The posts of a split, by group and number. Raises InputError where files are missing or not what they should be.

    Nothing of the archive is written to the disk.
    """
    if split not in SPLITS:
        raise InputError(f"split = '{split}' is unknown; choose {', '.join(SPLITS)}")
    unpacked = folder / SPLITS[split]
    archives = [folder / name for name in ARCHIVES if (folder / name).is_file()]
    if unpacked.is_dir():
        found = _unpacked(unpacked)
    elif archives:
        found = _archived(archives[0], SPLITS[split])
    else:
        raise InputError(
            f"{folder} holds neither the folder {SPLITS[split]} nor {ARCHIVES[0]}; download it from "
            f"http://qwone.com/~jason/20Newsgroups/{ARCHIVES[0]}"
        )
    posts = sorted(found)
    groups = len({post.group for post in posts})
    if groups != GROUPS:
        raise InputError(f"{folder}: posts of {groups} groups in '{split}', not of {GROUPS}; download it again")
    return posts


def _unpacked(folder: Path) -> Iterator[Post]:
    for group in folder.iterdir():
        for file in group.iterdir() if group.is_dir() else ():
            if file.name.isdigit():
                yield Post(group.name, int(file.name), file.read_text("latin-1"))


def _archived(path: Path, split: str) -> Iterator[Post]:
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = _PATH.fullmatch(member.name)
                if name is None or name["split"] != split or not member.isreg():
                    continue
                content = archive.extractfile(member)
                assert content is not None  # it is a regular file
                yield Post(name["group"], int(name["id"]), content.read().decode("latin-1"))
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise InputError(f"{path}: not a whole archive; download it again") from error


def body(text: str, remove: Iterable[str] = ()) -> str:
    """A post without its headers and what `remove` names: "footers" (signatures), "quotes"."""
    text = text.replace("\r\n", "\n").partition("\n\n")[2]
    if "quotes" in remove:
        text = "\n".join(line for line in text.split("\n") if not _QUOTE.search(line))
    if "footers" in remove:
        lines = text.strip().split("\n")
        last = next((i for i in range(len(lines) - 1, 0, -1) if not lines[i].strip().strip("-")), None)
        text = text if last is None else "\n".join(lines[:last])
    return text


@cache
def _lemmas() -> Callable[[str], str | None]:
    """A word's lemma, or None for a stop word."""
    try:
        from simplemma import Lemmatizer
        from stop_words import get_stop_words
    except ImportError as error:
        raise InputError(f"reading text needs {error.name}: pip install 'secure-fvi[text]'") from None
    stop, lemmatizer = frozenset(get_stop_words("en")), Lemmatizer()

    @cache
    def lemma(word: str) -> str | None:
        if word in stop:
            return None
        found = lemmatizer.lemmatize(word, lang="en").lower()
        return found if _WORD.fullmatch(found) and found not in stop else None

    return lemma


def tokens(text: str) -> list[str]:
    """Its words in order: lemmas of at least three letters that are no stop words."""
    lemma = _lemmas()
    return [found for word in _WORD.findall(text.lower()) if (found := lemma(word)) is not None]


def corpus(
    data_dir: Path | None = None,
    split: str = "train",
    words: int | tuple[str, ...] = 2000,
    remove: Iterable[str] = (),
) -> Corpus:
    """Counts of words in the posts of `split`: of so many most common ones of the training posts, or of those given.

    Raises InputError for missing files and options that do not fit.
    """
    remove = tuple(remove)
    unknown = [name for name in remove if name not in REMOVABLE]
    if unknown:
        raise InputError(f"remove = '{unknown[0]}' is unknown; choose {', '.join(REMOVABLE)}")
    if not isinstance(words, tuple) and (type(words) is not int or words < 2):
        raise InputError(f"words must be a whole number of at least 2, not {words!r}")
    folder = data_folder(FOLDER, data_dir)

    def counted(posts: list[Post]) -> list[Counter[str]]:
        return [Counter(tokens(body(post.text, remove))) for post in posts]

    posts = read_posts(folder, split)
    rows = counted(posts)
    if not isinstance(words, tuple):
        words = _most_common(rows if split == "train" else counted(read_posts(folder, "train")), words)
    counts = torch.from_numpy(_counts(rows, words))
    kept = counts.sum(1) > 0
    names = sorted({post.group for post in posts})
    groups = torch.tensor([names.index(post.group) for post in posts])
    return Corpus(counts[kept], words, groups[kept], torch.arange(len(posts))[kept])


def _most_common(posts: Iterable[Counter[str]], words: int) -> tuple[str, ...]:
    """By the number of posts, then by the alphabet."""
    occurs = Counter(word for post in posts for word in post)
    if len(occurs) < words:
        raise InputError(f"words = {words}, but the training posts have {len(occurs)} different ones")
    return tuple(sorted(occurs, key=lambda word: (-occurs[word], word))[:words])


def _counts(posts: list[Counter[str]], words: tuple[str, ...]) -> npt.NDArray[np.float32]:
    place = {word: v for v, word in enumerate(words)}
    out = np.zeros((len(posts), len(words)), np.float32)
    for row, post in zip(out, posts, strict=True):
        for word, count in post.items():
            if word in place:
                row[place[word]] = count
    return out


def load(
    data_dir: Path | None = None, split: str = "train", words: int = 2000, remove: tuple[str, ...] = ()
) -> Dataset:
    """`counts` (N, V); see `corpus`. A newsgroup is a client (`[partition] by_client`)."""
    found = corpus(data_dir, split, words, remove)
    return Dataset({"counts": found.counts}, found.ids, found.groups)


PROGRAM = Program(
    name="newsgroups",
    description="ProdLDA with 21 topics on 20 Newsgroups (11,314 posts, 2,000 words)",
    model=prodlda(21),
    load=load,
)
