package rendezvous

import (
	"os"

	"golang.org/x/term"

	"github.com/euryale-ml/euryale/internal/env"
)

// Terminal reports whether a line that a program rewrites on standard error, such as a progress
// bar, appears on a terminal. Either standard error is one, or "euryale run" passes such lines on
// to one, as it does for rank 0. It then sets EURYALE_TERMINAL=1, which getenv, such as os.Getenv,
// reads.
func Terminal(getenv func(string) string) bool {
	return env.Terminal.Set(getenv) || term.IsTerminal(int(os.Stderr.Fd()))
}
