"""`moba-data`: from raw text and conversations to training corpora.

cli               the commands
cli_corpus        the commands for corpora of real long documents
input_files       which files are read
decompress        opening compressed files
shards            the input split into parts
documents         documents from files
holdout           which documents are held out
outputs           files that appear complete or not at all, and are not overwritten
train_tokenizer   training a sentencepiece tokenizer
encoders          text to token ids, with three types of tokenizers
segments          faster encoding with sentencepiece models
tokenize_corpus   from text to a corpus
parts             one part of a corpus, made once by any process
conversations     conversations from JSON records
sft               from conversations to a corpus with a loss mask
show              documents of a corpus as text
long_range        long documents whose end depends on their beginning, for miniature recipes
build_corpus      a corpus of real long documents, step by step
corpus_options    what determines it besides its sources
corpus_sources    packages that have text, and where they keep it
corpus_files      the files of a source: no duplicates, some folders held out
corpus_documents  long documents of neighbouring files
corpus_recall     its share of synthetic documents
corpus_manifest   what it was made of, and its name
excerpt           some documents of such a corpus
repeats           how far back the text of a corpus repeats itself
stats             document lengths, and the sparsity of MoBA on them
blend             preview of a recipe's blend
verify            checking every byte of a corpus
progress          progress bars and log lines
"""
