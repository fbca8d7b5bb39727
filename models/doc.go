// Package models loads language models from Hugging Face folders, builds their graphs with package
// layers, and writes folders that transformers reads: GPT-2, and the family of Llama (Llama 2 and
// 3, Mistral, Qwen 2 and 3).
//
//	m, err := models.Load("Llama-3.2-1B") // config.json and *.safetensors
//	defer m.Close()
//	b := layers.NewBuilder(gorgonia.NewGraph(), layout, tensor.Float32, seed)
//	tokens := b.Tokens("tokens", 1, batch, context)
//	targets := b.Tokens("targets", 1, batch, context)
//	logits, err := m.Logits(b, tokens)
//	loss := b.CrossEntropy(logits, targets)
//	learnables, err := b.Grad(loss)
//	machine, err := vm.New(b.Graph(), device, vm.WithSolver(solver, learnables...), ...)
//
// The builder's layout divides the graph over samples, positions and weights, and every layout
// computes what one rank computes.
//
// Learnables have the names of Hugging Face's tensors, so checkpoints and errors use names that are
// known from there. Weights of linear layers are [in..., out...] here and in GPT-2's files; in the
// Llama family's files they are [out, in], and are transposed as they are read and written.
//
// Package models/texts makes samples of texts and conversations. Several documents may share a
// sample: Logits then takes the positions of tokens in their documents.
//
// # Generation
//
// A [Generator] continues texts, one token of each row at a time, with caches of keys and values:
//
//	g, err := models.NewGenerator(m, device, models.GenerateOptions{Batch: 4, Context: 1024})
//	defer g.Close()
//	err = g.Generate(ctx, prompts, models.Sampling{Temperature: 0.8, TopP: 0.95, Stop: m.EOS},
//		func(row, token int) error { ... })
//
// Of more prompts than rows the others wait, and each takes the place of a row that has ended. With
// a Layout, ranks share the weights and the caches of a model that is too large, or too slow, for
// one.
//
// # What is read
//
// A model is what transformers makes of its folder, or the folder is refused. config.json chooses
// the architecture by model_type. A key that is missing means what transformers' class of that type
// takes for it; a key or value whose effect is not known here is an error that names it, unless it
// is null, false or empty. So it is with adapter_config.json and PEFT's LoraConfig: kinds of
// adapters that are not plain LoRA are refused, and so are those whose loading changes the model's
// weights, such as PiSSA and OLoRA.
//
// Weights are in model.safetensors, or in several files that model.safetensors.index.json lists, in
// f32, f16 or bf16; if both are there, Load reads model.safetensors. Each tensor is used, or shown
// to be redundant, such as a copy of the embedding as the head, or is an error of Logits that names
// it, as a missing tensor and a wrong shape are. Load checks headers before it takes memory, and
// returns an error for a damaged file. Logits reads tensors one at a time as it builds the graph: a
// rank needs memory for its learnables and one tensor.
//
// # Dropout
//
// Configurations of models and adapters ask for dropout in training, and graphs of Logits have it:
// evaluation (vm.Eval) and a Generator have none. Masks follow from [Model.Random]:
//
//	m.Random.Next(layout.Replica * batch) // after each run that trains
//
// m.Random = nil before Logits leaves dropout out. Dropout of the weights of attention, as GPT-2's
// folders ask for it, keeps these weights of all positions in memory.
//
// # Padding
//
// As in transformers, lookups give the row of pad_token_id no gradient in the Llama family, and one
// like others in GPT-2. An embedding that is the output head, too, learns it there.
package models
