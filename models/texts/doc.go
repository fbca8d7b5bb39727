// Package texts makes samples of texts and conversations, on which a language model of package
// models trains:
//
//	samples, cut, err := texts.Read("Llama-3.2-1B-Instruct", 1024, "book.txt", "chats.jsonl")
//	samples, err = texts.Pack(samples, 1024)
//
// # Files
//
// A file whose name ends in .jsonl has a document on each line: {"text": "..."}, or {"messages":
// [{"role": "user", "content": "..."}, ...]}, a conversation. Keys of other names are ignored, but
// those that would change what a conversation is, such as "tools", are refused. Any other file is
// one document, its text. Files are UTF-8, with or without a byte order mark.
//
// A text becomes tokens with those that the tokenizer puts around it, and ends with the
// tokenizer's EOS. All of its tokens are targets. A longer text than the context is cut into
// several samples, each of whose targets is in one of them.
//
// # Conversations
//
// A conversation is written by the folder's chat template: chat_template.jinja or, without that
// file, chat_template of tokenizer_config.json. Only answers are targets, which are what the
// assistant writes, with what ends it. If the template has {% generation %}, these are the parts in
// it. Otherwise an answer is what a message adds to the text that asks for it
// (add_generation_prompt). Some templates write an answer in another way once messages follow, as
// Qwen 3 leaves out how it was thought out: then each answer is a sample of its own, behind the
// text that the model would see before it. A conversation that is longer than the context loses its
// end.
//
// Templates are rendered by package gonja as transformers renders them by Jinja, except that
// strftime_now is not defined, so that samples do not depend on the day. Statements that read other
// files are refused, and so is what gonja does not parse, such as conditions in parentheses. A
// template is a program, which may take for ever: take folders from whom you trust with that.
package texts
