package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
)

// writePlan writes the plan to the file of EURYALE_PLAN, if it is set: as text, as a drawing of the
// arena, or as JSON for "euryale report". The file of a machine of [Eval] has ".eval" before its
// extension, plan.eval.txt. A later machine of the same kind overwrites it. With WithElastic it is
// the plan of the first generation: a full disk does not end a training.
func (m *Machine) writePlan() error {
	to := env.Plan.Text(os.Getenv)
	if to == "" || m.Elastic() != nil {
		return nil
	}
	text := m.plan.String
	switch filepath.Ext(to) {
	case ".txt":
	case ".svg":
		text = m.plan.SVG
	case ".json":
		text = m.plan.JSON
	default:
		return fmt.Errorf("vm: %w", env.Plan.Wrong(to,
			fmt.Errorf("%w: end its name in .txt, .svg or .json", backend.ErrArgument)))
	}
	if !m.training {
		to = strings.TrimSuffix(to, filepath.Ext(to)) + ".eval" + filepath.Ext(to)
	}
	if err := os.WriteFile(to, []byte(text()), 0o666); err != nil {
		return fmt.Errorf("vm: %w", env.Plan.Wrong(to, err))
	}
	return nil
}
