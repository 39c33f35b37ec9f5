"""Native checkpoints: saved in the background, published atomically, verified, loaded on any layout.

checkpointer   saves a checkpoint in the background
staging        copies in CPU memory, and a search for NaN and infinite values
writer         the save plan, and a rank's safetensors files
publisher      agreement of the ranks on where a checkpoint is published
process_group  the collectives of a save, and errors of single ranks
publish        how a checkpoint becomes visible, and how one is found again
retention      what became known about checkpoints later, and which stay on disk
load           loads into tensors that exist, on any layout
index          which bytes of which file hold each part of a tensor
manifest       sizes and hashes of the files; the meta
files          opens files, tries again what fails, and works in threads
state          the tensors that a run consists of, and a trained model from them
recipe         the recipe that training wrote into a checkpoint
"""
