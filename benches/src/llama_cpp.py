"""llama.cpp as the yardstick: reads "prefill N", "decode SEQUENCES STEPS" on standard input, answers each with tokens per second;
"turn PROMPT STEPS", a prompt from cold and then an answer, with seconds."""

import ctypes
import random
import sys
import time

import llama_cpp

path, threads = sys.argv[1], int(sys.argv[2])


@llama_cpp.llama_log_callback
def silent(level, text, data):
    pass


llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()
began = time.monotonic()
model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8 * 1024, 512, 512, 8
params.n_threads = params.n_threads_batch = threads
context = llama_cpp.llama_init_from_model(model, params)
memory = llama_cpp.llama_get_memory(context)
words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
print(time.monotonic() - began, llama_cpp.llama_print_system_info().decode(), flush=True)
batch = llama_cpp.llama_batch_init(512, 0, 8)


def run(rows):
    """rows: (token, position, sequence, scored)"""
    batch.n_tokens = len(rows)
    for at, (token, position, sequence, scored) in enumerate(rows):
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0] = sequence
        batch.logits[at] = scored
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")


for line in sys.stdin:
    what, *numbers = line.split()
    llama_cpp.llama_memory_clear(memory, True)
    word = lambda: random.randrange(100, words)
    if what == "prefill":
        count = int(numbers[0])
        rows = [(word(), at, 0, at == count - 1) for at in range(count)]
        began = time.monotonic()
        run(rows)
        rate = count / (time.monotonic() - began)
    elif what == "turn":
        count, steps = map(int, numbers)
        began = time.monotonic()
        for start in range(0, count, 512):
            end = min(start + 512, count)
            run([(word(), at, 0, at == count - 1) for at in range(start, end)])
        for step in range(steps):
            run([(word(), count + step, 0, True)])
        rate = time.monotonic() - began
    else:
        sequences, steps = map(int, numbers)
        for s in range(sequences):
            run([(word(), at, s, at == 31) for at in range(32)])
        began = time.monotonic()
        for step in range(steps):
            run([(word(), 32 + step, s, True) for s in range(sequences)])
        rate = sequences * steps / (time.monotonic() - began)
    print(rate, flush=True)
