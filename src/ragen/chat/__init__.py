"""From text to tokens and back.

Prompts, chat templates, the parser of replies, tool calls and control tokens. It may import
`algorithms` and the folders below and loads no torch.
"""
