"""Build the training corpus of `tiny`: documents, tokenizer and token files.

    python training/corpus.py --out BUILD

Four domains, all from the running Python and from Debian 12 packages, which are fetched with
`apt-get download` at the versions below and unpacked under BUILD (nothing is installed):

    prose   the King James Bible, one document a chapter, and The Devil's Dictionary
    python  the standard library's sources, one document a file
    man     manual pages of manpages, manpages-dev and perl-doc, rendered with groff
    docs    The Debian Administrator's Handbook and Debian Reference, as plain text

Needs apt-get, dpkg-deb and groff (Debian packages apt, dpkg, groff-base). A document is held out
when the hash of its name says so, so no later change of the corpus moves a document across.
"""

import argparse
import gzip
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = {
    "bible-kjv": "4.38",  # the program that decodes the next one's data
    "bible-kjv-text": "4.38",
    "dict-devil": "1.0-13.1",
    "manpages": "6.03-2",
    "manpages-dev": "6.03-2",
    "perl-doc": "5.36.0-7+deb12u4",
    "debian-handbook": "11.20220922",
    "debian-reference-en": "2.100",
}
HELD_OUT_ONE_IN = 24
VOCAB_SIZE = 4096
EOS_TOKEN = "<|endoftext|>"
# Tables, generated code and data, which would teach little but digits.
PYTHON_SKIP = (
    "site-packages/",
    "test/",
    "tests/",
    "encodings/",
    "pydoc_data/",
    "_sysconfigdata",
    "lib2to3/pgen2/",
)
GROFF = [
    "groff",
    "-Kutf8",
    "-t",
    "-man",
    "-Tutf8",
    "-rHY=0",
    "-rLL=80n",
    "-P-c",
    "-P-b",
    "-P-o",
    "-P-u",
]
MAX_DOCUMENT_CHARS = 400_000  # drops only perlapi-like reference dumps

Document = tuple[str, str]  # name, text


def fetch_packages(out: Path) -> Path:
    """Download and unpack PACKAGES; returns the folder with one subfolder a package."""
    debs, root = out / "debs", out / "packages"
    debs.mkdir(parents=True, exist_ok=True)
    for package, version in PACKAGES.items():
        target = root / package
        if target.exists():
            continue
        subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=debs, check=True)
        (deb,) = debs.glob(f"{package}_*.deb")
        root.mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", deb, target], check=True)
    return root


def prose_documents(root: Path) -> Iterator[Document]:
    """Chapters of the Bible, one verse a line, then the dictionary's entries in runs."""
    program = root / "bible-kjv/usr/bin/bible"
    text = subprocess.run(
        [program.resolve(), "-l10000", "gen1:1-rev22:21"],
        cwd=root / "bible-kjv-text/usr/lib",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        encoding="latin-1",
    ).stdout
    if not text.lstrip().startswith("Genesis 1"):
        text = "Genesis 1\n\n" + text
    heading = re.compile(r"^((?:[123] )?[A-Z][A-Za-z ]+ \d+)$", re.MULTILINE)
    parts = heading.split(text)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        verses = [line.strip() for line in body.splitlines() if line.strip()]
        yield f"kjv/{title}", title + "\n\n" + "\n".join(verses)
    with gzip.open(root / "dict-devil/usr/share/dictd/devil.dict.dz", "rt", encoding="utf-8") as f:
        entries = re.split(r"\n(?=[A-Z][A-Z' -]+, )", f.read())
    for start in range(1, len(entries), 20):
        lines = "\n".join(entries[start : start + 20]).splitlines()
        yield f"devil/{start}", "\n".join(line.strip() for line in lines)


def python_documents(_: Path) -> Iterator[Document]:
    """Every source file of the running interpreter's standard library but tests and tables."""
    library = Path(os.__file__).parent
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if not any(skip in name for skip in PYTHON_SKIP):
            yield f"python/{name}", path.read_text(encoding="utf-8", errors="strict")


def man_documents(root: Path) -> Iterator[Document]:
    """Rendered manual pages; redirects and Perl's change logs are left out."""
    for package in ("manpages", "manpages-dev", "perl-doc"):
        for path in sorted((root / package / "usr/share/man").glob("man*/*.gz")):
            if path.is_symlink() or re.match(r"perl\w*delta\.", path.name):
                continue
            source = gzip.decompress(path.read_bytes())
            if source.startswith(b".so "):
                continue
            # Ragged right: justified text would be full of doubled spaces.
            page = subprocess.run(GROFF, input=b".ad l\n" + source, capture_output=True, check=True).stdout.decode(
                "utf-8"
            )
            body = page.strip("\n").split("\n")[1:-1]  # without the page's head and foot
            yield f"{package}/{path.stem}", "\n".join(body)


class _HandbookText(HTMLParser):
    """Plain text of one page of the handbook; paragraphs become lines, listings stay as set."""

    BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "li", "pre", "dt", "dd", "tr", "div", "table")

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.skipped, self.verbatim = [], 0, 0

    def handle_starttag(self, tag, attrs):
        classes = dict(attrs).get("class") or ""
        if self.skipped or tag in ("head", "script") or "docnav" in classes:
            if tag not in ("br", "img", "hr", "meta", "link", "input"):
                self.skipped += 1
        elif tag in self.BLOCKS:
            self.parts.append("\n\n")
        self.verbatim += tag == "pre"

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        self.verbatim -= tag == "pre"
        if self.skipped:
            self.skipped -= 1
        elif tag in self.BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data):
        if not self.skipped:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        lines = [line.rstrip() for line in "".join(self.parts).splitlines()]
        return re.sub(r"\n{3,}", "\n\n", re.sub(r"^ (?! )", "", "\n".join(lines), flags=re.M))


def docs_documents(root: Path) -> Iterator[Document]:
    """Pages of the handbook and chapters' sections of the reference."""
    for path in sorted((root / "debian-handbook").glob("**/html/en-US/*.html")):
        parser = _HandbookText()
        parser.feed(path.read_text(encoding="utf-8"))
        yield f"handbook/{path.stem}", parser.text()
    (path,) = (root / "debian-reference-en").glob("**/debian-reference.en.txt.gz")
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    text = text[text.rindex("\nPreface\n") :]  # what comes before is the table of contents
    for section in re.split(r"\n(?=\d+\.\d+\. [^\n]+\n)", text):
        yield f"reference/{section.strip().splitlines()[0]}", section


DOMAINS = {
    "prose": prose_documents,
    "python": python_documents,
    "man": man_documents,
    "docs": docs_documents,
}


def clean(text: str) -> str:
    """Spaces at line ends go, and of several blank lines two stay."""
    text = re.sub(r"[ \t\r\f]+\n", "\n", text.replace("\r\n", "\n"))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokenizer, which GGUF calls "olmo"; no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to build in")
    out = parser.parse_args().out.resolve()
    root = fetch_packages(out)

    report = {"packages": PACKAGES, "python": platform.python_version(), "domains": {}}
    documents: dict[str, list[Document]] = {}
    seen: set[bytes] = set()
    for domain, collect in DOMAINS.items():
        documents[domain] = []
        for name, raw in collect(root):
            text = clean(raw)
            digest = hashlib.sha256(text.encode()).digest()
            if len(text) < 200 or len(text) > MAX_DOCUMENT_CHARS or digest in seen:
                continue
            seen.add(digest)
            documents[domain].append((name, text))
        print(domain, len(documents[domain]), sum(len(t) for _, t in documents[domain]), flush=True)

    tokenizer = train_tokenizer([text for docs in documents.values() for name, text in docs if not is_held_out(name)])
    tokenizer.save(str(out / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS_TOKEN)

    for domain, docs in documents.items():
        encodings = tokenizer.encode_batch([text for _, text in docs], add_special_tokens=False)
        sha = hashlib.sha256("".join(text for _, text in docs).encode()).hexdigest()
        info = {"documents": len(docs), "characters": sum(len(t) for _, t in docs), "sha256": sha}
        for split in ("train", "held_out"):
            chosen = [
                [*encoding.ids, eos]
                for (name, _), encoding in zip(docs, encodings, strict=True)
                if is_held_out(name) == (split == "held_out")
            ]
            # Documents keep their borders: the trainer shuffles them anew in each epoch.
            lengths = np.array([len(ids) for ids in chosen], np.int64)
            np.savez(
                out / f"{domain}.{split}.npz",
                tokens=np.concatenate([np.array(ids, np.uint16) for ids in chosen]),
                lengths=lengths,
            )
            info[f"{split}_documents"] = len(chosen)
            info[f"{split}_tokens"] = int(lengths.sum())
        report["domains"][domain] = info
    (out / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    json.dump(report, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
