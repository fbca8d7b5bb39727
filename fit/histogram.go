package fit

import (
	"math"
	"sort"

	"google.golang.org/protobuf/encoding/protowire"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/vm"
)

// histogram counts the finite elements of a tensor, in bins of one width from least to most.
type histogram struct {
	name                      string
	least, most, sum, squares float64
	limits, counts            [30]float64 // of the bins, as many as TensorBoard draws
}

func histogramOf(name string, elements []float64) histogram {
	h := histogram{name: name, least: math.Inf(1), most: math.Inf(-1)}
	for _, x := range elements {
		if finite(x) {
			h.least, h.most = min(h.least, x), max(h.most, x)
			h.sum, h.squares = h.sum+x, h.squares+x*x
		}
	}
	last, half := len(h.limits)-1, h.most/2-h.least/2 // of what may overflow
	for i := range h.limits {
		part := half * (float64(i+1) / float64(last+1))
		h.limits[i] = h.least + part + part
	}
	h.limits[last] = h.most
	for _, x := range elements {
		if finite(x) {
			h.counts[sort.Search(last, func(i int) bool { return x < h.limits[i] })]++
		}
	}
	return h
}

// encoded is a message HistogramProto of tensorflow/core/framework/histogram.proto.
func (h *histogram) encoded() []byte {
	n := 0.0
	var limits, counts []byte
	for i, count := range h.counts {
		n += count
		limits = protowire.AppendFixed64(limits, math.Float64bits(h.limits[i]))
		counts = protowire.AppendFixed64(counts, math.Float64bits(count))
	}
	var text []byte
	for i, x := range []float64{h.least, h.most, n, h.sum, h.squares} {
		text = protowire.AppendTag(text, protowire.Number(i+1), protowire.Fixed64Type)
		text = protowire.AppendFixed64(text, math.Float64bits(x))
	}
	text = protowire.AppendBytes(protowire.AppendTag(text, 6, protowire.BytesType), limits)
	return protowire.AppendBytes(protowire.AppendTag(text, 7, protowire.BytesType), counts)
}

// checkHistograms returns an error for a node of another graph, or that is no numbers.
func (t *trainer) checkHistograms(of vm.Summary) error {
	for _, n := range t.counted {
		if n.Graph() != of.Graph {
			return refused("fit.TensorBoard: %s is of another graph than the machine's", n.Name())
		}
		switch d := n.Dtype(); d {
		case tensor.Float32, tensor.Float64, tensor.Int:
		default:
			return refused("fit.TensorBoard: %s is %v: histograms are of Float32, Float64 or Int",
				n.Name(), d)
		}
	}
	return nil
}

// histograms returns what nodes have after a step, on rank 0. All ranks call it.
func (t *trainer) histograms() (all []histogram, err error) {
	var variables gorgonia.Nodes
	for _, n := range t.counted {
		if n.IsVar() {
			variables = append(variables, n)
		}
	}
	if len(variables) > 0 {
		err = t.machine.Pull(variables...)
	}
	for i := 0; i < len(t.counted) && err == nil && t.comm.Rank() == 0; i++ {
		n := t.counted[i]
		name := "values/" + n.Name()
		if n.IsVar() {
			name = "weights/" + n.Name()
		}
		for _, w := range n.DerivOf() {
			if w.IsVar() {
				name = "gradients/" + w.Name()
			}
		}
		x := numbers(n)
		if all = append(all, histogramOf(name, x)); x == nil {
			err = refused("fit.TensorBoard: the machine does not keep %s: use vm.Keep", n.Name())
		}
	}
	return all, err
}
