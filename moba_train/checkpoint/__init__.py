"""Native checkpoints: saved in the background, published atomically, verified, loaded on any layout.

checkpointer   saves a checkpoint in the background
finite         finds NaN and infinite values in what is saved
planned        DCP's save with one save plan for all saves
threads        a rank's files, written, hashed and read side by side
rank_group     the collectives of a save, and errors of single ranks
state          the tensors that a run consists of
publish        how a checkpoint becomes visible, and how one is found again
files          opens files, and tries again what fails
manifest       sizes and hashes of its files
index          DCP's index, read without trust
index_pickle   decodes the index
coverage       whether the index covers every tensor
retention      which checkpoints stay on disk
marks          checkpoints that are passed over although they are intact
evaluated      what the evaluations of a checkpoint's step found
small_file     small JSON files beside the checkpoints
load           loads into tensors that exist, on any layout
recipe         the recipe that training wrote into a checkpoint
trained_model  a trained model on one device
"""
