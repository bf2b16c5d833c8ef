"""Put the report of a comparison together: findings, tables and figures on one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from mhc.eval.common.page import Drawn, document, figures, text
from mhc.eval.compare.comparison import Comparison
from mhc.eval.compare.findings import Finding
from mhc.eval.compare.ngram import Baselines
from mhc.eval.compare.report import arms, beliefs, events, topologies
from mhc.eval.compare.report.explanation import HOW_TO_READ

_FEW = 6  # arms of which the details are open at first


def render(title: str, comparison: Comparison, statements: Sequence[Finding], drawn: Sequence[Drawn]) -> str:
    """Return the whole HTML document, figures inside."""
    sentences = "".join(f"<li>{text(finding.text)}</li>" for finding in statements if not finding.warning)
    warnings = "".join(f'<p class="warning">{text(finding.text)}</p>' for finding in statements if finding.warning)
    main, stability, stream = (
        figures([figure for figure in drawn if figure.section == section])
        for section in ("main", "stability", "stream")
    )
    count = f"{len(comparison.arms)} arm{'s' if len(comparison.arms) != 1 else ''}"
    deep = (
        "<details><summary>Inside the stream: distances to identity and uniform, effective streams and rank, "
        f"activations, attention, gradients per sublayer</summary>{stream}</details>"
        if any(figure.section == "stream" for figure in drawn)
        else ""
    )
    unfolded = " open" if len(comparison.arms) <= _FEW else ""
    body = f"""<h1>{text(title)}</h1>
<p class="lead">Comparison of {count}: residual topologies trained side by side.</p>
{warnings}
<ul class="findings">{sentences}</ul>
<h2>Topologies</h2>
{topologies.table_of(comparison)}
{_baselines(comparison.baselines)}{beliefs.section(comparison.beliefs)}
<h2>Curves</h2>
{main}
<h2>Stability</h2>
{events.section(comparison.histories)}
{stability}
{deep}
<h2>Details</h2>
<details{unfolded}><summary>Every arm</summary>
{arms.table_of(comparison)}
</details>
<details{unfolded}><summary>Gains recomputed from the final checkpoints</summary>
{arms.recomputed(comparison)}
</details>
<details{unfolded}><summary>How the configurations differ</summary>
{arms.differences(comparison)}
</details>
<h2>How to read this</h2>
{HOW_TO_READ}"""
    return document(title, body)


def _baselines(baselines: Baselines) -> str:
    if baselines.unigram is None or baselines.bigram is None:
        return f'<p class="note">No n-gram baselines: {text(baselines.reason)}.</p>'
    note = (
        f"Baselines on the same split: byte unigram {baselines.unigram:.4f}, byte bigram {baselines.bigram:.4f} bits "
        f"per byte (add-one smoothing over 256 bytes, counted on {baselines.train_bytes:,} training bytes, scored on "
        f"{baselines.validation_bytes:,} validation bytes)."
    )
    if baselines.truncated:
        note += " The corpus is larger; only its beginning was counted."
    return f'<p class="note">{note}</p>'
