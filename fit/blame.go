package fit

import (
	"fmt"
	"math"
	"reflect"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/internal/safetensors"
	"github.com/euryale-ml/euryale/internal/stock"
)

// checked is an operation of package ops/nn, some of whose operands have integers of a range.
type checked interface {
	CheckIndices(operand int, integers []int) error
}

// blame returns an error that names the sample and the number that is to blame for a loss that is
// not finite: an input that is NaN, a label or an index out of range, or else an input that is
// infinite, which a mask may be. It is nil if the batch has none.
func (b *batch) blame(inputs gorgonia.Nodes) error {
	var infinite error
	for i, row := range b.rows {
		of := "a row without a sample, as Data.Pad leaves it"
		if i < len(b.samples) {
			of = fmt.Sprintf("sample %d", b.samples[i])
		}
		for k, n := range inputs {
			at, x := worst(row[k])
			if at >= 0 {
				err := fmt.Errorf("element %v of input %s of %s is %v",
					safetensors.Indices(at, n.Shape()[1:]), n.Name(), of, x)
				if math.IsNaN(x) {
					return err
				}
				if infinite == nil {
					infinite = fmt.Errorf("%w: if that is meant, as in a mask, lower the rate, or "+
						"bound the gradients by vm.ClipNorm", err)
				}
			}
			if err := outside(n, row[k], map[*gorgonia.Node]bool{}); err != nil {
				return fmt.Errorf("input %s of %s: %w", n.Name(), of, err)
			}
		}
	}
	return infinite
}

// worst returns the first NaN of a slice of floats, or else the first infinity; -1 if there is
// none.
func worst(row any) (at int, x float64) {
	at = -1
	v := reflect.ValueOf(row)
	if v.Len() == 0 || !v.Index(0).CanFloat() {
		return -1, 0
	}
	for i := range v.Len() {
		switch is := v.Index(i).Float(); {
		case math.IsNaN(is):
			return i, is
		case at < 0 && math.IsInf(is, 0):
			at, x = i, is
		}
	}
	return at, x
}

// outside returns the error of an operation that reads a row of integers and whose range these
// leave.
func outside(n *gorgonia.Node, row any, seen map[*gorgonia.Node]bool) error {
	integers, ok := row.([]int)
	if n.Dtype() != tensor.Int || !ok || seen[n] {
		return nil
	}
	seen[n] = true
	for _, reader := range n.Graph().AllNodes() {
		for i, x := range stock.Operands(reader) {
			if x != n {
				continue
			}
			if op, ok := reader.Op().(checked); ok {
				if err := op.CheckIndices(i, integers); err != nil {
					return err
				}
			}
			if stock.Name(reader.Op()) == "reshapeOp" { // which has the same integers
				if err := outside(reader, row, seen); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
