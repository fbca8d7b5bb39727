package vm

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/euryale-ml/euryale/backend"
)

// writePlan writes the plan to the file of EURYALE_PLAN, if it is set: as text, or as a drawing of
// the arena. A machine that is made later in the process writes over it.
func (m *Machine) writePlan() error {
	to := os.Getenv("EURYALE_PLAN")
	if to == "" {
		return nil
	}
	text := m.plan.String
	switch filepath.Ext(to) {
	case ".txt":
	case ".svg":
		text = m.plan.SVG
	default:
		return fmt.Errorf("vm: EURYALE_PLAN: %w: %q: end its name in .txt or .svg", backend.ErrArgument, to)
	}
	if err := os.WriteFile(to, []byte(text()), 0o666); err != nil {
		return fmt.Errorf("vm: EURYALE_PLAN: %w", err)
	}
	return nil
}
