// Package layers builds transformers, and networks of convolutions, whose work is divided among
// ranks: over samples (data parallelism), over the positions of a sequence (sequence parallelism),
// and over weights (tensor parallelism), in any combination of the three. The same program builds
// the model on one rank.
//
//	// Sequences and weights are on 2 ranks each, samples on the rest.
//	l, err := layers.NewLayout(comm, 0, 2, 2)
//	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, seed)
//	tokens := b.Tokens("tokens", 1, batch, context)
//	targets := b.Tokens("targets", 1, batch, context)
//	embedding := b.Learn("words", layers.Normal(0.02), 0, vocabulary, width)
//	x := b.To(b.Embedding(embedding, tokens), layers.Tensor, layers.Replicated)
//	x = b.Positions("positions", x)
//	heads := layers.AttentionOptions{Heads: 4, Causal: true}
//	for i := range depth {
//		name := fmt.Sprint("block", i)
//		h := b.LayerNorm(name+".norm1", x)
//		x = b.Add(x, b.Attention(name+".attention", h, heads))
//		h = b.LayerNorm(name+".norm2", x)
//		x = b.Add(x, b.MLP(name+".mlp", h, 4*width))
//	}
//	loss := b.CrossEntropy(b.Logits(b.LayerNorm("norm", x), embedding), targets)
//	learnables, err := b.Grad(loss)
//	machine, err := vm.New(b.Graph(), device, vm.WithSolver(solver, learnables...), b.Training())
//
// # Layout
//
// A [Layout] arranges the ranks of a communicator as data x sequence x tensor, with the ranks of a
// tensor group side by side, then those of a sequence group. So if each machine has as many ranks
// as a tensor group, only gradients and sequences travel between machines. Where ranks may be lost
// and replaced, [NewElasticLayout] has them shard weights.
//
// A rank is in one group of each kind: a Tensor group shards weights, a Sequence group shards
// positions, and l.Data is the ranks with the same part of the weights, which add up the gradients
// of their learnables.
//
// # Placement
//
// Every [Node] says, for its Sequence group and for its Tensor group, how the ranks of the group
// hold it:
//
//	placement    value                           gradient
//	Replicated   the same on every rank          the same on every rank
//	Copied       the same on every rank          the sum of the ranks' gradients
//	Split(axis)  the ranks' parts, concatenated  that of each part
//	Partial      the sum of the ranks' values    the same on every rank
//
// [Builder.To] is the only way from one placement to another. It is a collective, and its gradient
// is the way back:
//
//	from         to           forward          backward
//	Replicated   Copied       nothing          all-reduce
//	Replicated   Split        own part         all-gather
//	Copied       Split        own part         zeros around it
//	Split        Replicated   all-gather       own part
//	Split        Copied       all-gather       reduce-scatter
//	Split        Split        all-to-all       all-to-all
//	Partial      Replicated   all-reduce       nothing
//	Partial      Copied       all-reduce       all-reduce
//	Partial      Split        reduce-scatter   all-gather
//
// In a group of one rank nothing moves. Placements are checked there, too: a program that builds on
// one rank is composed correctly on any layout. Operations accept only operands with which their
// result and all gradients are right; any other operand is an [ErrPlacement] that names the missing
// collective. An operation itself moves its learnables to the placement it needs.
//
// The loss is counted once: it is Partial over the Sequence group, whose ranks have the mean of
// their positions, weighted by their number, and a share of the mean over the batches of all Data
// ranks. So if the ranks of l.Data add up gradients, these belong to the mean over all samples and
// positions, also with uneven lengths. With [Tokens.Padding] the loss is the mean over all targets
// that count, and ranks may have different numbers of them. [Builder.Training] is the option of
// vm.New for all of this, and vm.New refuses to train the graph in another way.
//
// # Blocks
//
// [Builder.Attention], [Builder.CrossAttention], [Builder.MLP] and [Builder.SwiGLU] enter and leave
// tensor-parallel work by themselves: their result is placed like their x. There are two ways to
// hold x between them. Replicated over the Tensor group, each block costs an all-reduce forward and
// one backward. Split along the sequence, it costs an all-gather and a reduce-scatter each way, the
// same bytes, and norms and residuals are sharded, too (Korthikanti et al., "Reducing Activation
// Recomputation in Large Transformer Models", 2022).
//
// Attention shards heads among the ranks of a Sequence group, after an all-to-all that gives each
// rank all positions of its heads; a second one brings the results back (Jacobs et al., "DeepSpeed
// Ulysses", 2023). Queries, keys and values travel in one call. Lengths and heads need not divide
// evenly: the first ranks have one more. Every rank needs at least one of each.
//
// [Builder.Conv2D], [Builder.BatchNorm], [Builder.ConvBlock] and [Builder.Residual] take images,
// which are sharded along the batch alone: Split(0) over the Sequence group makes its ranks
// additional data ranks. With vm.SyncBatchNorm, a batch norm takes its statistics over the samples
// of all ranks of l.Data:
//
//	x := b.To(layers.Whole(images), layers.Sequence, layers.Split(0))
//	x = b.ConvBlock("stem", x, 64, [2]int{3, 3}, nn.ConvOptions{Pad: []int{1, 1}})
//	x = b.Residual("block", x, 128, 2)
//
// [Builder.MoE] shards experts among the ranks of a Tensor group, and the samples whose tokens
// these ranks route: one all-to-all brings tokens to their experts, and one brings results back.
// [Builder.LSTM], [Builder.GRU] and [Builder.MoE] need all positions of a sample on one rank: an
// all-to-all, To(x, Sequence, Split(axis of the batch)), shards samples instead of positions.
//
// [Builder.Table] is an embedding of very many rows, which the ranks of l.Data shard: ids and rows
// travel in all-to-alls outside of the graph, and a step pays only for its rows.
//
// # Random numbers
//
// Learnables begin with values that follow from the seed and their name. Each rank draws the whole
// and keeps its part, so that every layout begins with the same model. Masks of [Builder.Dropout]
// depend on the position of each element in the whole.
//
// # Norms of gradients, and checkpoints
//
// [Builder.Sharded] says which learnables are parts: the others are the same on all ranks of a
// Tensor group. With [Builder.Training], vm.ClipNorm counts each element once, and checkpoints have
// whole learnables, which any layout may load.
//
// # Checked operations and others
//
// A Node embeds Gorgonia's node, so you can use other operations: [Place] gives their result its
// placement, unchecked.
//
// # Files
//
// layout.go is the division of ranks, placement.go the placements and what they allow, move.go
// the collectives between them, builder.go the graph and its learnables. linear.go, attention.go,
// norm.go, conv.go, recurrent.go, experts.go, dropout.go, embedding.go and table.go are the layers,
// loss.go ends the graph, and training.go says how to train it.
package layers
