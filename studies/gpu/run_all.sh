#!/usr/bin/env bash
# Trains, searches, compares and measures a model made on the spot, in steps of at most ten minutes, 28 in all.
# `bash studies/gpu/run_all.sh --help`; README.md beside this file says what each step needs.
set -euo pipefail

SELF=$(readlink -f "$0")
# Folders that the caller names are relative to where the caller stands.
for name in WORK OUT WHEELS CORPUS; do
    if [[ -n ${!name:-} ]]; then export "$name=$(realpath -m "${!name}")"; fi
done
cd "$(dirname "$SELF")/../.."

# Step, seconds it may take with the 1b model, and the file that shows it is done.
STEPS=(
    "environment   60 environment.json"
    "gpu-tests    180 gpu-tests.txt"
    "train        330 layerskip-training.json"
    "train-stock  200 stock-training.json"
    "search       270 layerskip-summary.json"
    "search-stock 120 stock-summary.json"
    "compare      240 compare.json"
    "bench        180 bench.json"
    "audit         90 audit.json"
    "summary       10 results.md"
)

usage() {
    cat <<'TEXT'
usage: run_all.sh [--size 1b|tiny] [--within SECONDS] STEP... | all
       run_all.sh --list

A step whose result exists is skipped; a step that was cut off goes on where it can. A step that fails ends the run.
--size    1b (24 layers x 2048, on a CUDA device) or tiny (the same steps on a CPU, in about two minutes) [1b]
--within  start no step that could end later than this, so that the same command can be given again
--list    the steps and their time limits in seconds with the 1b model

Environment:
  WORK    models, studies and results so far [studies/gpu/.work/SIZE]; must stay between calls
  OUT     results and logs are copied here at the end, whatever happened [studies/gpu/results/SIZE]
  PACK    1: as one results.tar.gz, beside results.md
  WHEELS  folder of wheels to install for this run alone (into WORK/site), where packages are missing
  PYTHON  the interpreter [.venv/bin/python where there is one, else python3]
  CORPUS  folder of Python sources to train on [the interpreter's own library]

Exit codes: 0 all done, 1 a step failed, 2 bad arguments, 3 more steps to do (--within), 130 stopped.
TEXT
}

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*"; }

refuse() {
    printf 'run_all.sh: error: %s\n' "$*" >&2
    exit 2
}

# field NUMBER STEP: a column of the table above; 1 is the step's own name.
field() {
    local line name rest
    for line in "${STEPS[@]}"; do
        read -r name rest <<<"$line"
        if [[ $name == "$2" ]]; then
            awk -v n="$1" '{print $n}' <<<"$line"
            return
        fi
    done
}

# limit STEP: seconds; a rehearsal has all it may need, because a CPU may be busy with other work.
limit() {
    if [[ $SIZE == 1b ]]; then field 2 "$1"; else echo 600; fi
}

numbers_of_size() {
    case $SIZE in
    1b)
        DEVICE=cuda DTYPE=bfloat16 MIN_GPU_GIB=60 MIN_DISK_GIB=12
        TRAIN=(--seconds 240) TRAIN_STOCK=(--seconds 120)
        SEARCH=(--trials 200 --timeout 110) SEARCH_STOCK=(--trials 100 --timeout 25)
        STRATEGIES=ours,random,draft-verify,layerskip,swift,clasp,knapspec
        SEEDS=2 MOST_TRIALS=25 AUDIT=(--settings 20 --prompts 2)
        BENCH=(--num-prompts 6 --repeats 3 --compile)
        ;;
    tiny)
        DEVICE=cpu DTYPE=float32 MIN_GPU_GIB=0 MIN_DISK_GIB=1
        TRAIN=(--steps 10 --threads 1) TRAIN_STOCK=(--steps 10 --threads 1)
        SEARCH=(--trials 3) SEARCH_STOCK=(--trials 3)
        STRATEGIES=ours,random
        SEEDS=2 MOST_TRIALS=2 AUDIT=(--settings 3 --prompts 2)
        BENCH=(--num-prompts 2 --repeats 1 --no-compile)
        ;;
    *) refuse "--size: must be 1b or tiny, got '$SIZE'" ;;
    esac
}

# keep FILE NAME: a small result, whole or not at all.
keep() {
    cp "$1" "$RESULTS/$2.partial"
    mv "$RESULTS/$2.partial" "$RESULTS/$2"
}

# study FOLDER SETTINGS: a study folder with its settings.
study() {
    mkdir -p "$WORK/$1"
    cp "studies/gpu/settings/$SIZE/$2.toml" "$WORK/$1/study.toml"
}

train_model() {
    local recipe=$1
    shift
    "$PYTHON" -m studies.demo.make_model --size "$SIZE" --recipe "$recipe" --device "$DEVICE" --dtype "$DTYPE" \
        --no-checkpoints --work-dir "$WORK/$recipe/maker" --out "$WORK/$recipe/model" \
        ${CORPUS:+--corpus "$CORPUS"} "$@"
    keep "$WORK/$recipe/model/training.json" "$recipe-training.json"
}

search_model() {
    local recipe=$1
    shift
    study "$recipe" study
    "$PYTHON" -m search.run --study "$WORK/$recipe" "$@"
    keep "$WORK/$recipe/best.json" "$recipe-best.json"
    keep "$WORK/$recipe/summary.json" "$recipe-summary.json"
}

inside() {
    case $1 in
    environment)
        if [[ -n ${WHEELS:-} ]]; then
            "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$WORK/site" "$WHEELS"/*.whl
        fi
        "$PYTHON" -m studies.gpu.environment --device "$DEVICE" --min-gpu-gib "$MIN_GPU_GIB" \
            --min-disk-gib "$MIN_DISK_GIB" --work "$WORK" --out "$RESULTS/environment.json"
        ;;
    gpu-tests)
        if [[ $DEVICE == cpu ]]; then
            echo "not run: the tests marked gpu need a CUDA device" >"$WORK/gpu-tests.txt"
        else
            # These files alone: others may import what only their own tests need.
            local files
            mapfile -t files < <(grep -rl --include='test_*.py' 'mark[.]gpu' tests)
            "$PYTHON" -m pytest -m gpu -rs -p no:cacheprovider "${files[@]}" | tee "$WORK/gpu-tests.txt"
            grep -qE '[0-9]+ passed' "$WORK/gpu-tests.txt" # skipped tests alone prove nothing
        fi
        keep "$WORK/gpu-tests.txt" gpu-tests.txt
        ;;
    train) train_model layerskip "${TRAIN[@]}" ;;
    train-stock) train_model stock "${TRAIN_STOCK[@]}" ;;
    search) search_model layerskip "${SEARCH[@]}" ;;
    search-stock) search_model stock "${SEARCH_STOCK[@]}" ;;
    compare)
        local num_strategies trials
        study comparison comparison
        num_strategies=$(tr , '\n' <<<"$STRATEGIES" | wc -l)
        trials=$("$PYTHON" -m studies.gpu.trials --study "$WORK/comparison" --summary "$RESULTS/layerskip-summary.json" \
            --seconds "$(limit compare)" --runs $((num_strategies * SEEDS)) --most "$MOST_TRIALS")
        "$PYTHON" -m search.compare --study "$WORK/comparison" --out "$WORK/comparison" --strategies "$STRATEGIES" \
            --seeds "$SEEDS" --trials "$trials" --checkpoints "$trials" --confirm-repeats 1
        keep "$WORK/comparison/table.md" compare-table.md
        keep "$WORK/comparison/results.json" compare.json
        ;;
    bench)
        "$PYTHON" -m studies.gpu.candidate "$WORK/layerskip" --out "$WORK/layerskip/bench-config.json"
        "$PYTHON" -m layerskip.bench --config "$WORK/layerskip/bench-config.json" --json "$WORK/bench.json" "${BENCH[@]}"
        keep "$WORK/bench.json" bench.json
        ;;
    audit)
        "$PYTHON" -m search.replay_audit --study "$WORK/layerskip" "${AUDIT[@]}" --out "$WORK/audit.json"
        keep "$WORK/audit.json" audit.json
        ;;
    summary) "$PYTHON" -m studies.gpu.summarise "$RESULTS" --out "$RESULTS/results.md" ;;
    esac
}

run_step() {
    local step=$1 limit result log started=$SECONDS code=0
    limit=$(limit "$step") result=$RESULTS/$(field 3 "$step") log=$RESULTS/$1.log
    if [[ -s $result && $step != summary ]]; then
        say "$step: done before"
        return
    fi
    if ((WITHIN > 0 && SECONDS + limit > WITHIN)); then
        say "$step: may take $limit s, more than is left of $WITHIN; the same command again goes on"
        exit 3
    fi
    say "$step: at most $limit s, log in $log"
    # In the background, so that a signal to this script reaches it at once; TERM lets a search stop cleanly.
    timeout --signal=TERM --kill-after=20 "$limit" "$BASH" "$SELF" --size "$SIZE" --inside "$step" >"$log" 2>&1 &
    child=$!
    wait "$child" || code=$?
    child=
    printf '%s\t%s\t%s\t%s\n' "$step" $((SECONDS - started)) "$limit" "$code" >>"$RESULTS/steps.tsv"
    if ((code == 0)) && [[ -s $result ]]; then
        say "$step: done in $((SECONDS - started)) s"
        return
    fi
    case $code in
    0) say "$step failed: it left no $result; the last lines of $log:" ;;
    124 | 137) say "$step failed: not done after $limit s; the last lines of $log:" ;;
    *) say "$step failed with exit code $code; the last lines of $log:" ;;
    esac
    tail -n 15 "$log" | sed 's/^/    /'
    exit 1
}

# shellcheck disable=SC2329 # called by a trap
publish() {
    mkdir -p "$OUT"
    if [[ ${PACK:-} == 1 ]]; then
        tar -czf "$OUT/results.tar.gz" -C "$RESULTS" .
        if [[ -f $RESULTS/results.md ]]; then cp "$RESULTS/results.md" "$OUT/"; fi
    else
        cp -R "$RESULTS/." "$OUT/"
    fi
}

# shellcheck disable=SC2329 # called by a trap
stop() {
    if [[ -n $child ]]; then
        kill -TERM "$child" 2>/dev/null || true
        wait "$child" || true
    fi
    say "stopped; the same command goes on"
    exit 130
}

# All in one function, so that the file may change while a run of half an hour reads it.
main() {
    local wanted=() step
    SIZE=1b WITHIN=0 INSIDE='' child=''
    while (($#)); do
        case $1 in
        --help | -h)
            usage
            exit 0
            ;;
        --list)
            printf '%s\n' "${STEPS[@]}" | awk '{print $1, $2}'
            exit 0
            ;;
        --size | --within | --inside)
            [[ $# -ge 2 ]] || refuse "$1: needs a value"
            case $1 in
            --size) SIZE=$2 ;;
            --within) WITHIN=$2 ;;
            --inside) INSIDE=$2 ;;
            esac
            shift
            ;;
        all) mapfile -t wanted < <(printf '%s\n' "${STEPS[@]}" | awk '{print $1}') ;;
        *)
            [[ -n $(field 1 "$1") ]] || refuse "STEP: must be all or one of those that --list prints, got '$1'"
            wanted+=("$1")
            ;;
        esac
        shift
    done
    numbers_of_size
    [[ $WITHIN =~ ^[0-9]+$ ]] || refuse "--within: must be a whole number of seconds, got '$WITHIN'"

    if [[ -z ${PYTHON:-} ]]; then
        PYTHON=python3
        if [[ -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; fi
    fi
    WORK=${WORK:-studies/gpu/.work/$SIZE}
    OUT=${OUT:-studies/gpu/results/$SIZE}
    RESULTS=$WORK/results
    export PYTHON WORK OUT
    export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1

    if [[ -n $INSIDE ]]; then
        trap 'exit 143' TERM # after the command that runs now, which gets the same signal and may have to tidy up
        inside "$INSIDE"
        exit
    fi
    ((${#wanted[@]})) || refuse "STEP: name steps, or all; --list prints them"
    mkdir -p "$RESULTS"
    PYTHONPATH=$(realpath -m "$WORK/site")${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    trap publish EXIT
    trap stop INT TERM
    for step in "${wanted[@]}"; do run_step "$step"; done
    say "results in $OUT"
}

main "$@"; exit
