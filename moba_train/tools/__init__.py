"""The command line, conversion, report, planning of layouts, lm-eval, RULER, launch templates.

Nothing else imports this folder.
"""
