"""Plots of a run, and comparisons of runs.

plots          all plots of a run, drawn when it ends
loss_plot      `loss.png`
position_plot  `position_wise.png`
compare        what differs between two runs
"""
