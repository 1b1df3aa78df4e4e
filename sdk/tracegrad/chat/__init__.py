"""Exact continuation: the tokens of a prompt that goes on from a recorded turn, proven, or a fork.

    messages ──matching──> which recorded turn this continues, and the recorded conversation
             ──splice────> its tokens + sampled tokens + the rendering of what is new

`matching` compares what was said, however a client wrote it down again. `splice` renders the
recorded conversation with the model's own chat template (`model`, `template`, `messages`), proves
in the text where the last reply ends (`cut`, `probes`) and encodes only what follows (`tokenizer`,
`reading`). Whatever is not proven is a `Fork` with its `Reason`, and the engine renders the prompt.

Pure functions: nothing here waits, reads the store, or imports transformers or torch.
"""
