package main

import (
	"fmt"
	"os"

	"github.com/alecthomas/kong"
	kongcompletion "github.com/jotaen/kong-completion"
	"github.com/posener/complete"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
)

// completionCmd is "euryale completion".
type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help is what --help says below the title.
func (completionCmd) Help() string {
	return `What it prints makes the tab key complete commands, flags and their values. Put it
where your shell starts:

	source <(euryale completion bash)    # in ~/.bashrc
	source <(euryale completion zsh)     # in ~/.zshrc
	euryale completion fish | source     # in ~/.config/fish/config.fish`
}

// Run prints the lines.
func (c *completionCmd) Run(parsed *kong.Context) error {
	return (&kongcompletion.Completion{Shell: c.Shell, Code: true}).Run(parsed)
}

// completing answers a shell that asks how its command line may go on, and reports whether one
// does.
func completing(parser *kong.Kong) bool {
	if os.Getenv("COMP_LINE") == "" {
		return false
	}
	var commands []string
	for _, c := range parser.Model.Children {
		if !c.Hidden {
			commands = append(commands, c.Name)
		}
	}
	var backends []string
	for _, b := range euryale.Backends() {
		backends = append(backends, b.Name())
	}
	kongcompletion.Register(parser, kongcompletion.WithPredictors(map[string]complete.Predictor{
		"backend":    complete.PredictSet(backends...),
		"collective": named(backend.Kinds()),
		"command":    complete.PredictSet(commands...),
		"dtype":      named(backend.DTypes()),
		"directory":  complete.PredictDirs("*"),
		"file":       complete.PredictFiles("*"),
		"link":       complete.PredictSet("pcie", "cube-mesh", "fully-connected"),
		"op":         named(backend.ReduceOps()),
	}))
	return true
}

// named predicts the names of values.
func named[T fmt.Stringer](values []T) complete.Predictor {
	var names []string
	for _, v := range values {
		names = append(names, v.String())
	}
	return complete.PredictSet(names...)
}
