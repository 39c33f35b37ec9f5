"""The HTML report of runs, plots of a run, comparisons and scaling fits of runs.

page              `moba-train report`: one HTML file; `assets` has its template, style sheet and program
history           a run folder, read tolerantly
curves            which steps are drawn, and the smoothed loss
chart             a chart as data
training_charts   loss, throughput, learning rate, gradient norm, data
position_charts   loss by position
retrieval_charts  needle maps, selected blocks, RULER
gate_charts       gate probes
planned           the throughput that a run was planned to have
facts             tiles and tables
plots             the PNG plots of a run, drawn when it ends
loss_plot         `loss.png`
position_plot     `position_wise.png`
needle_plot       `needle.png`
scaling           the loss as a power law of compute, group by group
scaling_report    `moba-train fit-scaling`: lines for the terminal, `scaling.json`
scaling_runs      finished runs as points of a fit: compute, losses, group
scaling_fit       power laws with bootstrap intervals
scaling_plot      `scaling.png`
compare           what differs between two runs
"""
