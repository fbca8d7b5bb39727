package nn

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/testing/nilargs"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestNilArgumentsAreErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	n := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float32, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name))
	}
	vector, matrix, four := n("v", 2), n("m", 2, 2), n("x", 1, 1, 2, 2)
	three, five := n("t", 1, 1, 2), n("f", 1, 1, 1, 2, 2)
	indices := gorgonia.NewVector(g, tensor.Int, gorgonia.WithShape(2), gorgonia.WithName("i"))
	ones, one := [2]int{1, 1}, n("c", 1)
	choices := gorgonia.NewMatrix(g, tensor.Int, gorgonia.WithShape(2, 2), gorgonia.WithName("c"))
	x, state, o := n("sequence", 3, 1, 2), n("state", 1, 1, 1), RecurrentOptions{}
	wih, whh, bias := n("wih", 4, 2), n("whh", 4, 1), n("bias", 4)
	lstm := []any{o, x, state, state, wih, whh, bias, bias}
	wih, whh, bias = n("wih3", 3, 2), n("whh3", 3, 1), n("bias3", 3)
	gru := []any{o, x, state, wih, whh, bias, bias}
	nilargs.Check(t, map[string]nilargs.Use{
		"And":             {F: And, Args: []any{vector, vector}},
		"ArgMax":          {F: ArgMax, Args: []any{0, false, matrix}},
		"ArgMin":          {F: ArgMin, Args: []any{0, false, matrix}},
		"Attention":       {F: Attention, Args: []any{four, four, four, AttentionOptions{}}},
		"AvgPool2D":       {F: AvgPool2D, Args: []any{ones, [2]int{}, ones, four}},
		"BatchedMatMul":   {F: BatchedMatMul, Args: []any{false, false, four, four}},
		"ByIndices":       {F: ByIndices, Args: []any{0, matrix, indices}},
		"Cast":            {F: Cast, Args: []any{tensor.Int, vector}},
		"Concat":          {F: Concat, Args: []any{0, vector}},
		"Conv1D":          {F: Conv1D, Args: []any{ConvOptions{}, three, three, vector}},
		"Conv2D":          {F: Conv2D, Args: []any{ConvOptions{}, four, four, vector}},
		"Conv3D":          {F: Conv3D, Args: []any{ConvOptions{}, five, five, vector}},
		"ConvTranspose2D": {F: ConvTranspose2D, Args: []any{ConvOptions{}, four, four, vector}},
		"CrossEntropy":    {F: CrossEntropy, Args: []any{NoLabel, matrix, indices}},
		"CumSum":          {F: CumSum, Args: []any{0, CumSumOptions{}, vector}},
		"CrossEntropyWith": {F: CrossEntropyWith, Args: []any{CrossEntropyOptions{}, matrix,
			indices}},
		"Dropout":         {F: Dropout, Args: []any{0.5, NewRandom(1), vector}},
		"Embedding":       {F: Embedding, Args: []any{matrix, indices}},
		"GELU":            {F: GELU, Args: []any{vector}},
		"GELUTanh":        {F: GELUTanh, Args: []any{vector}},
		"GRU":             {F: GRU, Args: gru},
		"GatherElements":  {F: GatherElements, Args: []any{0, vector, indices}},
		"GlobalAvgPool2D": {F: GlobalAvgPool2D, Args: []any{four}},
		"Grad":            {F: Grad, Args: []any{gorgonia.Must(gorgonia.Sum(vector)), vector}},
		"LSTM":            {F: LSTM, Args: lstm},
		"IndexCopy":       {F: IndexCopy, Args: []any{0, matrix, indices, matrix}},
		"LayerNorm":       {F: LayerNorm, Args: []any{0.5, matrix, vector, vector}},
		"LogSoftMax":      {F: LogSoftMax, Args: []any{0, vector}},
		"LogSumExp":       {F: LogSumExp, Args: []any{[]int{0}, false, vector}},
		"MaskedFill":      {F: MaskedFill, Args: []any{vector, vector, 1.0}},
		"MaxPool2D":       {F: MaxPool2D, Args: []any{ones, [2]int{}, ones, four}},
		"Norm":            {F: Norm, Args: []any{3, 0, vector}},
		"Not":             {F: Not, Args: []any{vector}},
		"Or":              {F: Or, Args: []any{vector, vector}},
		"OuterProd":       {F: OuterProd, Args: []any{vector, vector}},
		"RMSNorm":         {F: RMSNorm, Args: []any{0.5, matrix, vector}},
		"ReduceMax":       {F: ReduceMax, Args: []any{[]int{0}, false, vector}},
		"ReduceMin":       {F: ReduceMin, Args: []any{[]int{0}, false, vector}},
		"ReduceProd":      {F: ReduceProd, Args: []any{[]int{0}, false, vector}},
		"Rotary":          {F: Rotary, Args: []any{RotaryOptions{}, matrix, one, one}},
		"RotaryAngles":    {F: RotaryAngles, Args: []any{tensor.Float64, 1e4, 0, 1, 2}},
		"ScatterAdd":      {F: ScatterAdd, Args: []any{0, 3, vector, indices}},
		"Slice":           {F: Slice, Args: []any{0, 0, 1, 1, vector}},
		"Slots":           {F: Slots, Args: []any{2, 2, choices, matrix}},
		"SoftMax":         {F: SoftMax, Args: []any{0, vector}},
		"Split":           {F: Split, Args: []any{0, []int{1, 1}, vector}},
		"SwiGLU":          {F: SwiGLU, Args: []any{vector, vector}},
		"TopK":            {F: TopK, Args: []any{0, 1, vector}},
		"Where":           {F: Where, Args: []any{vector, vector, vector}},
		"Xor":             {F: Xor, Args: []any{vector, vector}},
	}, map[string]string{
		"Defects":     "it returns none",
		"Conv1D.bias": "no bias", "Conv2D.bias": "no bias", "Conv3D.bias": "no bias",
		"ConvTranspose2D.bias": "no bias",
	})
	found := Defects(nil)
	require.Check(t, found == nil, "nil has defects: %v", found)
}
