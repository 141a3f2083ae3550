module github.com/eae-runtime/eae-runtime

go 1.26.0

require (
	github.com/go-python/gopy v0.4.10
	github.com/stretchr/testify v1.11.1
	github.com/wangkuiyi/gotorch v0.0.0-20201028015551-9afed2f3ad7b
	go.uber.org/goleak v1.3.0
	golang.org/x/sync v0.24.0
	golang.org/x/tools v0.52.0
	pgregory.net/rapid v1.3.0
)

require (
	github.com/davecgh/go-spew v1.1.1 // indirect
	github.com/gonuts/commander v0.1.0 // indirect
	github.com/gonuts/flag v0.1.0 // indirect
	github.com/pkg/errors v0.9.1 // indirect
	github.com/pmezard/go-difflib v1.0.0 // indirect
	golang.org/x/mod v0.42.0 // indirect
	golang.org/x/telemetry v0.0.0-20261009151841-97e8ea77aa2a // indirect
	gopkg.in/yaml.v3 v3.0.1 // indirect
)

tool github.com/go-python/gopy

tool golang.org/x/tools/cmd/goimports
