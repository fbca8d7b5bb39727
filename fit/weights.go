package fit

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/internal/stock"
)

// weighing finds how a loss reads Data.Weights.
type weighing struct {
	data  Data
	local int // rows of a batch
	known map[*gorgonia.Node]weighed
	mean  *gorgonia.Node // the first mean over the rows of a batch, nil for none
}

// weighed says what a node depends on.
type weighed struct {
	samples bool // inputs or Weights
	weights bool
	power   int  // of Weights: the node is a multiple of this power
	unclear bool // or of none
}

// weigh returns an error unless the loss is a sum of what samples add, each times its weight: then
// rows without a sample, whose weight is 0, count nowhere.
func (d Data) weigh(local int) error {
	if d.Weights == nil || d.Loss == nil {
		return nil
	}
	w := weighing{d, local, map[*gorgonia.Node]weighed{}, nil}
	l := w.of(d.Loss)
	wrong := ""
	switch {
	case !l.weights:
		wrong = "the Loss does not read Weights"
	case w.mean != nil:
		wrong = fmt.Sprintf("the Loss has a mean over the %d rows of a batch, %v", local,
			stock.Operation(w.mean))
	case !l.unclear && l.power > 1:
		wrong = "the Loss is multiplied by Weights twice"
	case !l.unclear && l.power < 1:
		wrong = "the Loss is divided by Weights as well as multiplied"
	default:
		return nil
	}
	return refused("fit.Data: %s: it must be the sum of Weights times the losses of rows, or one "+
		"weight times the mean of those that have a label (see package fit)", wrong)
}

// of returns what a node depends on.
func (w *weighing) of(n *gorgonia.Node) weighed {
	if is, ok := w.known[n]; ok {
		return is
	}
	var is weighed
	operands := stock.Operands(n)
	all := make([]weighed, len(operands))
	for i, x := range operands {
		all[i] = w.of(x)
		is.samples = is.samples || all[i].samples
		is.weights = is.weights || all[i].weights
		is.unclear = is.unclear || all[i].unclear
		is.power = max(is.power, all[i].power)
	}
	sign := ""
	if n.Op() != nil {
		sign = n.Op().String()
	}
	switch name := stock.Name(n.Op()); {
	case n == w.data.Weights:
		is = weighed{samples: true, weights: true, power: 1}
	case n.Op() == nil:
		for _, x := range w.data.Inputs {
			is.samples = is.samples || x == n
		}
	case name == "elemBinOp" && len(all) == 2 && !strings.HasPrefix(sign, "^"):
		is.power = w.binary([]rune(sign)[0], n, all, operands)
	case name == "linAlgBinOp" && len(all) == 2:
		is.power = all[0].power + all[1].power
	case !slices.Contains(linear(), name) && sign != "neg":
		is.unclear = is.unclear || is.power > 0
	}
	w.known[n] = is
	return is
}

// linear are Gorgonia's operations whose result is a multiple of what their operand is one of.
func linear() []string {
	return []string{"sumOp", "reshapeOp", "transposeOp", "sliceOp", "repeatOp", "dtConvOp",
		"concatOp"}
}

// binary returns the power of an element-wise operation, and notes a mean.
func (w *weighing) binary(sign rune, n *gorgonia.Node, all []weighed,
	operands gorgonia.Nodes) int {
	switch a, b := all[0].power, all[1].power; sign {
	case '⊙':
		return a + b
	case '÷':
		if w.mean == nil && w.rows(operands[1]) {
			w.mean = n
		}
		return a - b
	case '+', '-':
		return max(a, b)
	default: // a comparison, such as a mask
		return 0
	}
}

// rows reports whether a divisor is a product of sizes, as gorgonia.Mean makes it, of which one is
// the number of rows of something that samples change.
func (w *weighing) rows(n *gorgonia.Node) bool {
	operands := stock.Operands(n)
	switch stock.Name(n.Op()) {
	case "elemBinOp":
		for _, x := range operands {
			if w.rows(x) {
				return true
			}
		}
	case "sizeOp":
		axis := stock.Struct(n.Op()).FieldByName("axis")
		x := operands[0]
		return axis.IsValid() && axis.Int() == 0 && w.of(x).samples && x.Shape()[0] == w.local
	}
	return false
}
