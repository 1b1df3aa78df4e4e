"""Messages, chat template and tokenizer: how a conversation becomes tokens, for the proxy, the
trainer and the commands.

Pure functions: nothing here waits, reads the store, or imports transformers or torch.
"""
