//go:build !linux

package group

// allowedCores returns nil: processes use all cores.
func allowedCores() []int { return nil }

// lifeOf returns living: only ranks on GPUs wait for the ends of processes, and those are on Linux.
func lifeOf(string) int { return living }

func dead(life int) bool { return life == gone }

func closeProcess(int) {}
