# Sourced by the launchers that prepare data, after setup.sh.

choose_corpus() {  # DATA: makes that folder; sets $corpus, which --corpus may have given, and $select, the files of it
    local default made_of
    default=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
    mkdir -p "$1" || refuse "$PWD/$1 cannot be made; allowed: a checkout that can be written to"
    [ -n "$(ls "$1")" ] || echo "${corpus:-the standard library}" >"$1/.corpus"  # of whichever Python is used
    made_of=$(cat "$1/.corpus" 2>/dev/null || true)  # empty where the data was made by hand
    [ -z "$corpus" ] || [ "$corpus" = "$made_of" ] ||
        refuse "--corpus: given $corpus, but $PWD/$1 is of ${made_of:-other text}; omit --corpus to go on with that, \
or remove the folder and the runs that were trained on it"
    corpus=$made_of select=()
    if [ -z "$made_of" ] || [ "$made_of" = "the standard library" ]; then
        corpus=$default
        # The Python sources of the standard library, without tests, installed packages and character tables, which are
        # poor training text.
        select=(--glob '*.py')
        for folder in site-packages test tests encodings pydoc_data 'config-3*'; do select+=(--exclude "$folder"); done
    fi
}
