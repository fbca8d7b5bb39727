package fit

import (
	"math"

	"google.golang.org/protobuf/encoding/protowire"
	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/vm"
)

// histogram counts the finite elements of a tensor, in bins of one width from least to most.
type histogram struct {
	name                      string
	least, most, sum, squares float64
	bins                      [30]float64 // as TensorBoard draws
}

func histogramOf(name string, elements []float64) histogram {
	h := histogram{name: name, least: math.Inf(1), most: math.Inf(-1)}
	for _, x := range elements {
		if finite(x) {
			h.least, h.most = min(h.least, x), max(h.most, x)
			h.sum, h.squares = h.sum+x, h.squares+x*x
		}
	}
	for _, x := range elements {
		if finite(x) {
			at := 0 // if all are one number
			if h.least < h.most {
				at = int((x - h.least) / (h.most - h.least) * float64(len(h.bins)))
			}
			h.bins[min(at, len(h.bins)-1)]++
		}
	}
	return h
}

// encoded is a message HistogramProto of tensorflow/core/framework/histogram.proto.
func (h *histogram) encoded() []byte {
	n := 0.0
	var limits, counts []byte
	for i, count := range h.bins {
		n += count
		part := float64(i+1) / float64(len(h.bins))
		limits = protowire.AppendFixed64(limits,
			math.Float64bits(h.least*(1-part)+h.most*part))
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

// checkHistograms returns an error for a node of another graph.
func (t *trainer) checkHistograms(of vm.Summary) error {
	for _, n := range t.counted {
		if n.Graph() != of.Graph {
			return refused("fit.TensorBoard: %s is of another graph than the machine's", n.Name())
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
