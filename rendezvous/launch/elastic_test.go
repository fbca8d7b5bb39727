package launch

import (
	"strings"
	"testing"
)

func TestWrongElasticJobsAreRefused(t *testing.T) {
	for says, j := range map[string]Job{
		"at least 3 of 2 ranks": {Ranks: 2, Elastic: &Elastic{Least: 3}},
		"at least 0 of 2 ranks": {Ranks: 2, Elastic: &Elastic{}},
		"-1 spares":             {Ranks: 2, Elastic: &Elastic{Least: 1, Spares: -1}},
		"leave the restarts":    {Ranks: 2, MaxRestarts: 1, Elastic: &Elastic{Least: 1}},
		"one machine": {Ranks: 2, Elastic: &Elastic{Least: 1}, Machines: &Machines{Count: 2,
			Rendezvous: "127.0.0.1:1", Token: "secret"}},
	} {
		if err := Run(t.Context(), j); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("the error is %v, want one that says %q", err, says)
		}
	}
}

func TestAProgramThatCannotStartIsNotReplacedForEver(t *testing.T) {
	err := Run(t.Context(), Job{Program: "/bin/false", Ranks: 2, Elastic: &Elastic{Least: 1}})
	if err == nil || !strings.Contains(err.Error(), "the last 5 processes have ended") {
		t.Errorf("the error is %v", err)
	}
}
