"""Plots of a run, and comparisons of runs.

plots          all plots of a run, drawn when it ends
loss_plot      `loss.png`
position_plot  `position_wise.png`
needle_plot    `needle.png`
compare        what differs between two runs
"""
