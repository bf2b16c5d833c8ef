"""Tokenise a corpus once, into the folder that ``data.source='prepared:DIR'`` reads (`mhc.data.corpus.prepared`).

    python -m mhc.data.prepare --source 'text:corpus/*.jsonl' --tokenizer tok.json --out DIR

Shards are made in parallel, each from the same slice of the documents whatever the number of processes, under a
temporary name that is replaced when the shard is whole. Started again after it was killed, it keeps the shards that are
there, and ends with the same bytes. A file of the corpus that has changed meanwhile is refused by name.
"""

from __future__ import annotations

from mhc.data.prepare.run import prepare

__all__ = ["prepare"]
