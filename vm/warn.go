package vm

import (
	"fmt"
	"os"

	"github.com/euryale-ml/euryale/ops/nn"
)

// Notice says where New reports what a user should know of the graph, such as operations that
// Gorgonia computes wrongly. The default is standard error.
func Notice(say func(text string)) Option { return func(m *Machine) { m.notice = say } }

// toStandardError is the default of Notice.
func toStandardError(text string) { fmt.Fprintln(os.Stderr, "euryale:", text) }

// warn reports each defect of the graph once, with its first node.
func (m *Machine) warn() {
	seen := map[string]bool{}
	for _, d := range nn.Defects(m.graph) {
		if kind := d.What + d.Instead; !seen[kind] {
			seen[kind] = true
			m.notice("the graph has an operation of Gorgonia that is wrong: " + d.String() + " (docs/ops.md)")
		}
	}
}
