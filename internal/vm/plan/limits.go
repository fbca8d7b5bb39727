package plan

// Limits are the sizes at which planning decides otherwise. All but Tiles change speed, never
// values: tests draw them, so that small programs take every decision.
type Limits struct {
	// SmallLoop and LargeLoop are sizes, in elements, of loops that cost no more than their
	// launch, and of those that cost much more.
	SmallLoop, LargeLoop int
	// LoopValues and LoopOperands bound one loop. A CUDA kernel's parameters are 4 KiB; long loops
	// gain nothing more from being one.
	LoopValues, LoopOperands int
	// Up to ShortRow elements a row costs about as much as the launch of another loop. Longer
	// ones are worth a block each only if there are ManyRows, and beyond LongRow the caches of
	// GPUs do not hold those that are under way (132 blocks of an H100, 50 MiB).
	ShortRow, LongRow, ManyRows int
	// RematerializeBytes and RematerializeOps bound what loops rematerialize. Values of fewer bytes
	// stay in caches, and a few operations on what is loaded anyway cost less than a store and a
	// load.
	RematerializeBytes, RematerializeOps int
	// Besides is how many readers of an operand a fold is compared with, the latest ones, and
	// Search how many dependencies a search for a way between two groups follows, so that
	// planning takes time in proportion to the program. The models of bench/train have at most
	// 30 such readers. A group that needs more to be known is not merged, which costs a load
	// and a store.
	Besides, Search int
	// Tiles is in how many tiles logits are computed, 0 for none: see [lower.Tile]. Bits change.
	Tiles int
	// Memory bounds the bytes of all memory of the plan; 0 for no bound. Less than 0 is as little
	// as planning finds.
	Memory int
}

// Standard returns the limits of [New].
func Standard() Limits {
	return Limits{
		SmallLoop: 1 << 13, LargeLoop: 1 << 20, LoopValues: 64, LoopOperands: 24,
		ShortRow: 8192, LongRow: 65536, ManyRows: 64, RematerializeBytes: 4 << 20,
		RematerializeOps: 24, Besides: 64, Search: 1 << 12,
	}
}
