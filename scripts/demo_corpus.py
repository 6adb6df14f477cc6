"""Make a real corpus without a network: the Python standard library's own functions and classes.

Each sample is one function or class. The prompt is its signature and docstring (loss mask 0), the answer is
its body (loss mask 1). Tokens come from a byte-level BPE that is trained here, on these very samples.

    python scripts/demo_corpus.py OUT [--samples 9000] [--vocabulary 2048]

writes ``OUT/part-0.parquet``, ``OUT/part-1.parquet`` with the columns ``input_ids`` (list of int32),
``loss_mask`` (list of uint8), ``seq_len`` (int32), ``row`` (int64), and ``OUT/tokenizer.json``.
"""

import argparse
import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_FILES = 2
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("seq_len", pa.int32()),
        ("row", pa.int64()),
    ]
)


def split_definition(lines: list[str], node: Definition) -> tuple[str, str]:
    """Cut a definition before the first statement of its body, the docstring counting as prompt.

    A definition with nothing but a docstring has the docstring as its answer.
    """
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    first = node.body[1] if ast.get_docstring(node, clean=False) and len(node.body) > 1 else node.body[0]
    decorators = getattr(first, "decorator_list", [])
    # A body on the line of the `def` leaves that line as the answer: no prompt, but nothing lost either.
    cut = min([first.lineno, *(decorator.lineno for decorator in decorators)])
    indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]

    def text(low: int, high: int) -> str:
        return "".join(line.removeprefix(indent) for line in lines[low - 1 : high])

    return text(start, cut - 1), text(cut, node.end_lineno or cut)


def definitions(library: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (name, prompt, answer) for every function and class below `library`, tests left out."""
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a few templates and files in other encodings
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                yield f"{relative}:{node.lineno}", *split_definition(lines, node)


def choose(found: list[tuple[str, str, str]], num_samples: int) -> list[tuple[str, str, str]]:
    """Take `num_samples` of them by the hash of their name, in the order in which they were found."""
    keys = [hashlib.sha256(name.encode()).digest() for name, _, _ in found]
    chosen = sorted(sorted(range(len(found)), key=keys.__getitem__)[:num_samples])
    return [found[i] for i in chosen]


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a corpus from the standard library.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=9000)
    parser.add_argument("--vocabulary", type=int, default=2048)
    arguments = parser.parse_args()

    library = Path(sysconfig.get_paths()["stdlib"])
    found = list(definitions(library))
    chosen = choose(found, arguments.samples)
    prompts = [prompt for _, prompt, _ in chosen]
    answers = [answer for _, _, answer in chosen]
    tokenizer = train_tokenizer([p + a for p, a in zip(prompts, answers, strict=True)], arguments.vocabulary)
    end = tokenizer.token_to_id("<end>")

    # The parts are tokenised apart, so that the mask changes exactly where the answer starts.
    prompt_ids = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
    answer_ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(answers)]
    lengths = np.array([len(p) + len(a) for p, a in zip(prompt_ids, answer_ids, strict=True)])

    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    for part, rows in enumerate(np.array_split(np.arange(len(chosen)), NUM_FILES)):
        columns = {
            "input_ids": [prompt_ids[i] + answer_ids[i] for i in rows],
            "loss_mask": [[0] * len(prompt_ids[i]) + [1] * len(answer_ids[i]) for i in rows],
            "seq_len": lengths[rows],
            "row": rows,
        }
        pq.write_table(pa.table(columns, schema=SCHEMA), arguments.out / f"part-{part}.parquet")

    share = sum(map(len, answer_ids)) / lengths.sum()
    print(
        f"{len(chosen):,} of the {len(found):,} functions and classes under {library}: "
        f"{lengths.sum():,} tokens, "
        f"median {np.median(lengths):.0f}, mean {lengths.mean():.0f}, longest {lengths.max():,}; "
        f"{share:.0%} of the tokens bear loss"
    )


if __name__ == "__main__":
    main()
