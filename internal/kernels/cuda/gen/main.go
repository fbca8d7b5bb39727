// Command gen writes the texts whose machine code is embedded, as package cuda gives them
// to the driver, into a folder: family.sm_90.ptx for devices of compute capability 9.0. The ending
// names the target for which ptxas is to compile: sm_90a for texts that run on 9.0 alone.
//
//	go run ./internal/kernels/cuda/gen FOLDER
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/euryale-ml/euryale/internal/kernels/cuda"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

// capabilities are those whose machine code runs on 8.x, from the A100 on, and on 9.0, Hopper.
var capabilities = []int{80, 90}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("want the folder to write to")
	}
	for _, capability := range capabilities {
		texts, err := cuda.Texts(capability)
		if err != nil {
			return err
		}
		for family, text := range texts {
			target := fmt.Sprintf("sm_%d", capability)
			if strings.Contains(text, "\n.target "+target+"a") {
				target += "a"
			}
			path := filepath.Join(args[0], family+"."+target+".ptx")
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
