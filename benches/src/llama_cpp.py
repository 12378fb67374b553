"""llama.cpp as the baseline. Reads one measurement per line from standard input and prints its result:
"prefill N" and "decode SEQUENCES STEPS" print tokens per second; "turn PROMPT STEPS", a prefill without cached tokens
followed by an answer, prints seconds."""

import ctypes
import random
import sys
import time

import llama_cpp

path, threads = sys.argv[1], int(sys.argv[2])


@llama_cpp.llama_log_callback
def discard_log(level, text, data):
    pass


llama_cpp.llama_log_set(discard_log, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
start = time.monotonic()
model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())


def new_context(sequences, length):
    """A context for this number of sequences of this length."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = sequences * length, 512, 512, sequences
    params.n_threads = params.n_threads_batch = threads
    return llama_cpp.llama_init_from_model(model, params)


context = batch_context = new_context(8, 1024)
long_context = None
vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
print(time.monotonic() - start, llama_cpp.llama_print_system_info().decode(), flush=True)
batch = llama_cpp.llama_batch_init(512, 0, 8)


def run(rows):
    """Runs one batch. rows: (token, position, sequence, whether logits are computed)"""
    batch.n_tokens = len(rows)
    for at, (token, position, sequence, logits) in enumerate(rows):
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0] = sequence
        batch.logits[at] = logits
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")


for line in sys.stdin:
    kind, *numbers = line.split()
    if kind == "turn" and long_context is None:
        long_context = new_context(1, 8192)
    context = long_context if kind == "turn" else batch_context
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    token = lambda: random.randrange(100, vocabulary)
    if kind == "prefill":
        count = int(numbers[0])
        rows = [(token(), at, 0, at == count - 1) for at in range(count)]
        start = time.monotonic()
        run(rows)
        result = count / (time.monotonic() - start)
    elif kind == "turn":
        count, steps = map(int, numbers)
        start = time.monotonic()
        for first in range(0, count, 512):
            end = min(first + 512, count)
            run([(token(), at, 0, at == count - 1) for at in range(first, end)])
        for step in range(steps):
            run([(token(), count + step, 0, True)])
        result = time.monotonic() - start
    else:
        sequences, steps = map(int, numbers)
        for s in range(sequences):
            run([(token(), at, s, at == 31) for at in range(32)])
        start = time.monotonic()
        for step in range(steps):
            run([(token(), 32 + step, s, True) for s in range(sequences)])
        result = sequences * steps / (time.monotonic() - start)
    print(result, flush=True)
