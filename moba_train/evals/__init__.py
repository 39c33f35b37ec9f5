"""Evaluations that run inside training and from the command line.

evaluation       the interface
registry         the evaluations there are
validation_loss  mean token loss on held-out text
position_wise    loss by position in the context
gate_probe       what the gates of sparse layers select, in sampled queries
gate_statistics  the statistics of one layer's gate against full attention
needle           needle in a haystack
needle_signal    how a gate tells the needle's block from others, against the signal-to-noise model
signal_to_noise  that model, and one layer's statistics
probing          the queries, keys and values that layers attend with
ruler            RULER's tasks
ruler_tasks      their texts and answers
question_tokenizer  the tokens of a prompt, which begins as documents do
answers          what a model answers: teacher-forced or generated
selected_blocks  which heads select the block of a needle
haystack         natural and synthetic text, and the chat template around it
niah             the words of needle questions
words            English words for keys and lists
lengths          lengths of the samples that a stage is evaluated with
gradient_reach   which tokens the gradient of the loss gets to, layer by layer
gradient_norms   statistics of gradient norms by distance to the loss token
variants         the attentions that the same weights are evaluated with
stage            evaluations while a stage trains
checkpoint       `moba-train eval`
options          what it is asked for
results          what it found, as JSON beside the checkpoint
progress         its progress bars
local_model      a model on one device, from a checkpoint or a Hugging Face folder
span_profile     `moba-train profile-spans`: what masking the attention of each head would cost
span_search      which span each head gets
lm_eval          `moba-train lm-eval`: tasks of the package lm-eval
"""
