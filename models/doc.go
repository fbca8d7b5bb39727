// Package models loads language models from folders of Hugging Face, builds their graphs from
// package layers, and writes folders that transformers reads: GPT-2, and the family of Llama (Llama
// 2 and 3, Mistral without a sliding window, Qwen 2 and 3).
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
// The graph is one of package layers: it is divided over samples, positions and weights as the
// layout of the builder says, and every layout computes what one rank computes.
//
// Learnables have the names of Hugging Face's tensors, so that checkpoints and errors name what is
// known from there. Weights of linear layers are [in..., out...] here and in GPT-2's files; in
// those of the Llama family they are [out, in], and are transposed as they are read and written.
//
// # Generation
//
// A [Generator] continues texts, a token of each row at a time, with caches of keys and values:
//
//	g, err := models.NewGenerator(m, device, models.GenerateOptions{Batch: 4, Context: 1024})
//	defer g.Close()
//	err = g.Generate(ctx, prompts, models.Sampling{Temperature: 0.8, TopP: 0.95, Stop: m.EOS},
//		func(row, token int) error { ... })
//
// # What is read
//
// config.json chooses the architecture by model_type, and says the sizes. What it asks for and this
// package has not, such as a sliding window or another activation, is an error that names the key.
// Weights are in model.safetensors, or in several files that model.safetensors.index.json lists, in
// f32, f16 or bf16; of both, model.safetensors is read. Load checks headers before memory is taken,
// and returns the error of a damaged file. A missing tensor, a wrong shape and a tensor that the
// model has not are errors of Logits, which reads tensors one at a time as it builds the graph: a
// rank needs memory for its learnables and one tensor.
package models
