"""Native checkpoints: saved in the background, published atomically, verified, loaded on any layout.

checkpointer   saving one in the background
planned        its tensors written by DCP, planned once for all saves
together       the ranks of a save, and their errors
state          which tensors a run consists of
publish        how a checkpoint becomes visible, and how one is found again
manifest       sizes and hashes of its files
index          DCP's index, read without trust
retention      which checkpoints stay
load           into tensors that exist, on any layout
recipe         the recipe that training wrote into it
trained_model  a trained model on one device
"""
