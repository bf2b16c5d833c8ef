"""Explain, in words at the end of the report, what its tables and figures show."""

HOW_TO_READ = """
<p>A topology with streams mixes them at every sublayer <i>k</i> with a matrix H<sub>k</sub> (H_res). What the network
passes on is their product, so a small excess per sublayer compounds over depth. A run logs two composite gains per
sublayer, measured per token on a fixed probe batch and averaged over its tokens:</p>
<ul>
<li><b>Forward</b>, of H<sub>k</sub> … H<sub>1</sub> H<sub>0</sub>: the largest absolute row sum, by how much a signal
that all streams share can grow on its way from the embedding to sublayer <i>k</i>.</li>
<li><b>Backward</b>, of H<sub>S−1</sub> … H<sub>k</sub>: the largest absolute column sum, by how much a gradient can
grow on its way from the head back to sublayer <i>k</i>.</li>
</ul>
<p>A plain residual has gain 1 both ways. HC learns H_res freely, so its gains may take any value. mHC projects H_res
onto the doubly stochastic matrices (non-negative, rows and columns sum to 1), which are closed under products: exact
projection would give 1 in both directions at any depth.</p>
<p>The projection is a finite number of Sinkhorn iterations, and the last half-step decides which sums are exact. The
<code>paper</code> preset ends with the rows of H_res. The <code>deepseek</code> preset ends with the columns of a
matrix whose transpose is H_res, which are the rows of H_res again. Under both the rows sum to 1 (under
<code>deepseek</code> up to its eps), so the <b>forward</b> gain is 1 by construction and says nothing about training,
while the columns, and so the <b>backward</b> gain, carry the Sinkhorn error: judge mHC by that. The table of
recomputed gains shows both directions under both presets.</p>
<p>At <b>sublayer 0</b> all streams are still copies of the embedding. Mixing copies can only rescale them, by the row
sums of H_res, which are 1 for mHC: the map is inert there, whatever gain it shows. The figures over depth shade it.</p>
<p><b>Topologies</b> are arms that differ in learning rate and seeds alone. Each is judged at its own best rate, the one
with the lowest mean of the final validation over its seeds; a rate at which a seed diverged or was halted is never the
best. Differences to plain are taken seed by seed (same data order, same initial weights of everything but the maps),
and the 95 % interval of their mean is Student's t with n − 1 degrees of freedom. Where it includes 0 the seeds do not
separate the two; one seed separates nothing. Three seeds find only differences that are large against their spread; of
twenty comparisons one excludes 0 by chance; and a best rate picked on the validation set it is then judged by flatters
the topology with more rates. <b>Learning-rate sensitivity</b> is the mean over the rates of min(final validation loss,
loss before training), minus the lowest (arXiv:2309.14322); the loss before training is that of step 1.</p>
<p><b>Loss events</b> are what the run itself flagged: a loss or gradient norm more than its z-score threshold above the
steps before, or anything non-finite. Causes are the run's too, by rules of fixed order (docs/stability.md). A topology
that never spikes at this size has not been shown to be stable at a larger one.</p>
<p><b>Bits per byte</b> is the validation loss in bits divided by the bytes of text predicted, so that tokenisers can be
compared. <b>Spike score</b> is the share of steps whose loss lies more than 7 standard deviations from the mean of the
1000 steps before it, non-finite losses included; with less than 100 steps before it a loss is not judged. Seconds and
tokens per second are those of the machine at that time; arms that shared it with other work are slower.</p>
"""
