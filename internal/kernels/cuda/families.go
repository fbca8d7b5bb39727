package cuda

// QueueFamilies are the families of kernels that a queue may launch at any time, in captures and
// while other ranks wait: the arithmetic of package backend and the steps of sparse collectives. A
// device loads them when it is opened. They are a sixth of what there is to compile, by the time
// that ptxas takes for sm_90 (bench/results/2026-11/2026-11-26-machine-code.md).
func QueueFamilies() []string {
	return []string{"cast", "divide", "gather", "move", "reduce", "sparse", "widen"}
}

// Families of kernels that are loaded for what needs them: see Loaded.Prepare.
const (
	Products       = "gemm"
	Convolutions   = "convolve"
	Images         = "images" // pools and patches
	IndexedRows    = "rows"
	Recurrences    = "recurrent"
	FewRowProducts = "fewrows" // [Kernels.FewRows]
)

// AttentionFamilies are the kernels of [Kernels.Attention] and its gradient: on CUDA cores, and
// of bf16 for heads of up to 128 elements, and of up to 32, on tensor cores; and of
// [Kernels.FewQueries].
func AttentionFamilies() []string {
	return []string{"attention", "attention_bf16", "attention_few", "attention_narrow"}
}

// PeerFamilies are the kernels of [Kernels.Exchange], with Mesh or without.
func PeerFamilies(mesh bool) []string {
	if mesh {
		return []string{"allreduce", "ll128", "mesh"}
	}
	return []string{"allreduce", "ll128"}
}
